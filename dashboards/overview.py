"""The overview's matrix: model x recipe, a panel an ISA, each cell speed-up and accuracy verdict together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dashboards import wording
from dashboards.facts import FAIL, PASS, Facts
from dashboards.judging import Judgement
from harness.records import RunHeader, slug

#: Cells that the newest run did not measure stay on the overview for this long, marked with their age.
KEEP_S = 14 * 86400.0
#: A newest run older than this is announced as stale: a night was missed.
STALE_S = 36 * 3600.0


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest record of a cell on one host, and the run it is from."""

    header: RunHeader
    facts: Facts


@dataclass(frozen=True, slots=True)
class Bar:
    """Where a speed-up and its interval lie on the panel's scale, 0 to 100; ``one`` is where 1x lies."""

    length: float
    low: float | None
    high: float | None
    one: float


@dataclass(frozen=True, slots=True)
class CellView:
    """One field of the matrix. ``state`` names its look: pass, fail, unjudged, baseline, failed, skipped, invalid."""

    facts: Facts
    state: str
    level: int
    headline: str
    detail: str
    accuracy: str
    symbol: str
    spoken: str
    bar: Bar | None
    href: str
    age: str | None
    alarm: str | None


@dataclass(frozen=True, slots=True)
class Column:
    """A recipe as one engine executes it. ``first``: the first column of its engine."""

    engine: str
    recipe: str
    deploy: str
    first: bool

    @property
    def title(self) -> str:
        """The recipe, with the way of deployment where it is not the usual one."""
        return self.recipe if self.deploy == "jit" else f"{self.recipe} ({self.deploy})"


@dataclass(frozen=True, slots=True)
class Row:
    """A model under one scenario. ``span``: how many rows share the model's heading; 0 where an earlier one has it."""

    model: str
    family: str | None
    weights: str | None
    scenario: str
    title: tuple[str, str]
    task: str | None
    span: int
    cells: tuple[CellView | None, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """The cells of one ISA on one host."""

    host: str
    fingerprint: str
    columns: tuple[Column, ...]
    engines: tuple[tuple[str, int], ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """A tab. ``best``: the fastest cell among those whose accuracy passed."""

    isa: str
    title: str
    anchor: str
    matrices: tuple[Matrix, ...]
    best: CellView | None


SYMBOLS = {
    "pass": "✓",
    "fail": "✕",
    "unjudged": "?",
    "baseline": "=",
    "failed": "!",
    "skipped": "–",
    "invalid": "~",
}


def state_of(facts: Facts) -> str:
    """The one word that decides how a cell looks."""
    if facts.status != "ok":
        return facts.status if facts.status in SYMBOLS else "failed"
    if facts.trust.outcome == FAIL:
        return "fail"
    if facts.cell.engine == "int8" and facts.cell.recipe == "fp32":
        return "baseline"
    return "pass" if facts.trust.outcome == PASS else "unjudged"


def level_of(speedup: float | None) -> int:
    """0 to 4: how strongly a passing cell is tinted."""
    if speedup is None:
        return 0
    return sum(speedup >= limit for limit in (1.1, 1.75, 3.0, 5.0))


def accuracy_line(facts: Facts) -> str:
    """The accuracy of a cell in a few letters."""
    accuracy = facts.accuracy
    if accuracy is not None:
        return f"{wording.points(accuracy.delta)}, {wording.percent(accuracy.flips)} flips"
    if facts.trust.outcome == PASS:
        return "not quantized"
    return "synthetic weights" if facts.cell.weights == "synthetic" else "accuracy not judged"


def _bar(facts: Facts, top: float) -> Bar | None:
    if facts.speedup is None or top <= 0:
        return None
    scale = 100.0 / top
    low, high = facts.speedup_ci or (None, None)
    return Bar(
        length=min(facts.speedup * scale, 100.0),
        low=None if low is None else max(low * scale, 0.0),
        high=None if high is None else min(high * scale, 100.0),
        one=scale,
    )


def _lines(facts: Facts, state: str) -> tuple[str, str, str]:
    """Headline, detail and accuracy of a cell."""
    if state in ("failed", "skipped", "invalid"):
        return state, facts.reason or "no reason was recorded", ""
    if facts.withheld:
        blame = " and ".join(facts.trust.blame) or "accuracy"
        return "withheld", f"{blame} {'fail' if ' and ' in blame else 'fails'}" if state == "fail" else facts.trust.reason, accuracy_line(facts)
    if state == "baseline":
        return "1.00×", "baseline", throughput_line(facts)
    if facts.speedup is None:
        return wording.MISSING, "no FP32 baseline in this run", accuracy_line(facts)
    return wording.ratio(facts.speedup), wording.ratio_interval(facts.speedup_ci), accuracy_line(facts)


def throughput_line(facts: Facts) -> str:
    """Absolute speed in a few letters."""
    return MISSING_SPEED if facts.throughput is None else f"{wording.significant(facts.throughput)} seq/s"


MISSING_SPEED = "speed not measured"


def view(latest: Latest, *, newest: str, now: float, top: float, alarm: str | None = None) -> CellView:
    """The look of one cell. ``newest``: the run whose cells need no age; ``top``: the end of the panel's scale."""
    facts = latest.facts
    state = state_of(facts)
    headline, detail, accuracy = _lines(facts, state)
    old = latest.header.run_id != newest
    spoken = f"{facts.key}: {headline}, {detail}"
    if accuracy:
        spoken += f", {accuracy}, accuracy verdict {facts.trust.outcome}"
    return CellView(
        facts=facts,
        state=state,
        level=level_of(facts.speedup),
        headline=headline,
        detail=detail,
        accuracy=accuracy,
        symbol=SYMBOLS[state],
        spoken=spoken + (f", gate: {alarm}" if alarm else ""),
        bar=_bar(facts, top) if state in ("pass", "unjudged") else None,
        href=f"series/{slug(facts.key)}.html",
        age=wording.age(now - latest.header.started_at) if old else None,
        alarm=alarm,
    )


def _columns(cells: Iterable[Facts]) -> tuple[Column, ...]:
    names = sorted(
        {(one.cell.engine, one.cell.recipe, one.cell.deploy) for one in cells},
        key=lambda name: (
            wording.rank(name[0], wording.ENGINE_ORDER),
            wording.rank(name[1], wording.RECIPE_ORDER),
            name[2] != "jit",
            name[2],
        ),
    )
    return tuple(
        Column(engine, recipe, deploy, index == 0 or names[index - 1][0] != engine)
        for index, (engine, recipe, deploy) in enumerate(names)
    )


def _rows(found: Mapping[str, Latest], columns: tuple[Column, ...], views: Mapping[str, CellView]) -> tuple[Row, ...]:
    by_row: dict[tuple[str, str], list[Latest]] = {}
    for latest in found.values():
        by_row.setdefault((latest.facts.cell.model, latest.facts.cell.scenario), []).append(latest)
    drafts: list[Row] = []
    for (model, scenario), members in sorted(by_row.items()):
        tasks: list[str | None] = sorted({one.facts.cell.task for one in members if one.facts.cell.task}) or [None]
        for task in tasks:
            fields = {
                (one.facts.cell.engine, one.facts.cell.recipe, one.facts.cell.deploy): views[one.facts.key]
                for one in sorted(members, key=lambda one: one.facts.cell.task is not None)
                if one.facts.cell.task in (None, task)
            }
            drafts.append(
                Row(
                    model,
                    members[0].facts.cell.family,
                    members[0].facts.cell.weights,
                    scenario,
                    wording.scenario_title(scenario),
                    task,
                    0,
                    tuple(fields.get((column.engine, column.recipe, column.deploy)) for column in columns),
                )
            )
    spans: dict[str, int] = {}
    for row in drafts:
        spans[row.model] = spans.get(row.model, 0) + 1
    rows, before = [], None
    for row in drafts:
        first = row.model != before
        before = row.model
        rows.append(
            Row(
                row.model,
                row.family,
                row.weights,
                row.scenario,
                row.title,
                row.task,
                spans[row.model] if first else 0,
                row.cells,
            )
        )
    return tuple(rows)


def host_title(header: RunHeader) -> str:
    """A host in words: its CPU's name, else the fingerprint."""
    name = header.host.get("cpu_model")
    return str(name) if name else f"host {header.fingerprint}"


def panels(
    latest: Mapping[str, Mapping[str, Latest]], judgements: Mapping[str, Judgement], *, now: float
) -> tuple[Panel, ...]:
    """The overview's tabs, one an ISA.

    Args:
        latest: per host fingerprint, per cell key, the newest record.
        judgements: per host fingerprint, the gate's word on its newest run.
        now: Unix time in seconds.
    """
    isas = sorted(
        {one.facts.cell.isa for cells in latest.values() for one in cells.values()},
        key=lambda isa: wording.rank(isa, wording.ISA_ORDER),
    )
    made = []
    for place, isa in enumerate(isas):
        mine = {
            host: {key: one for key, one in cells.items() if one.facts.cell.isa == isa}
            for host, cells in latest.items()
        }
        top = max(
            (one.facts.speedup_ci or (0.0, one.facts.speedup))[1]
            for cells in mine.values()
            for one in cells.values()
            if one.facts.speedup is not None
        ) if any(one.facts.speedup for cells in mine.values() for one in cells.values()) else 1.0
        matrices, best = [], None
        for host, cells in mine.items():
            if not cells:
                continue
            judgement = judgements.get(host)
            newest = max(cells.values(), key=lambda one: one.header.started_at).header
            if judgement is not None:
                newest = judgement.header
            alarms = judgement.alarms() if judgement else {}
            views = {
                key: view(one, newest=newest.run_id, now=now, top=top, alarm=alarms.get(key))
                for key, one in cells.items()
            }
            columns = _columns(one.facts for one in cells.values())
            engines: dict[str, int] = {}
            for column in columns:
                engines[column.engine] = engines.get(column.engine, 0) + 1
            matrices.append(
                Matrix(host_title(newest), host, columns, tuple(engines.items()), _rows(cells, columns, views))
            )
            for one in views.values():
                faster = one.facts.speedup or 0.0
                if one.state == "pass" and (best is None or faster > (best.facts.speedup or 0.0)):
                    best = one
        made.append(Panel(isa, wording.isa_title(isa), f"isa-{place}", tuple(matrices), best))
    return tuple(made)


def recent(latest: Mapping[str, Latest]) -> dict[str, Latest]:
    """The cells of one host that are young enough, by the age of the host's newest run, to stand on the overview."""
    newest = max(one.header.started_at for one in latest.values())
    return {key: one for key, one in latest.items() if newest - one.header.started_at <= KEEP_S}
