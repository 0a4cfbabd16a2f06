"""The overview's matrix: model x recipe, a panel an ISA, each cell speed-up and accuracy verdict together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dashboards import wording
from dashboards.facts import FAIL, PASS, Facts
from dashboards.judging import Judgement
from harness.records import RunHeader, slug
from harness.verdicts import is_quantized

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
    """A model under one scenario."""

    model: str
    family: str | None
    weights: str | None
    scenario: str
    title: tuple[str, str]
    task: str | None
    cells: tuple[CellView | None, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """The cells of one ISA on one host."""

    host: str
    fingerprint: str
    columns: tuple[Column, ...]
    engines: tuple[tuple[str, int], ...]
    rows: tuple[Row, ...]

    def models(self) -> list[tuple[str, list[Row]]]:
        """The rows by model, in their order: real weights first."""
        return [(model, list(rows)) for model, rows in itertools.groupby(self.rows, key=lambda row: row.model)]


@dataclass(frozen=True, slots=True)
class Panel:
    """A tab.

    ``best`` is the fastest quantized cell of engine ``int8`` among those whose accuracy passed; ``peer`` that of the
    other engines, on the same model and scenario where there is a ``best``. ``slower`` counts regressed cells.
    """

    isa: str
    title: str
    anchor: str
    matrices: tuple[Matrix, ...]
    best: CellView | None
    peer: CellView | None
    slower: int


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
        return f"{wording.points(accuracy.delta)}, {wording.percent(accuracy.flips)} flips".replace(
            " ", "\N{NO-BREAK SPACE}"
        ).replace(",\N{NO-BREAK SPACE}", ", ")
    if facts.trust.outcome == PASS:
        return "not quantized"
    return "speed only" if facts.cell.weights == "synthetic" else "accuracy not judged"


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
        blame = wording.joined([BLAMES.get(name, name) for name in facts.trust.blame]) or "accuracy"
        return (
            "withheld",
            f"{blame} {'fail' if ' and ' in blame else 'fails'}" if state == "fail" else facts.trust.reason,
            accuracy_line(facts),
        )
    if state == "baseline":
        return "1.00×", "baseline", throughput_line(facts)
    if facts.speedup is None:
        return wording.MISSING, "no FP32 baseline in this run", accuracy_line(facts)
    return wording.ratio(facts.speedup), wording.ratio_interval(facts.speedup_ci), accuracy_line(facts)


def throughput_line(facts: Facts) -> str:
    """Absolute speed in a few letters."""
    return MISSING_SPEED if facts.throughput is None else f"{wording.significant(facts.throughput)} seq/s"


#: What failed, in words that fit into a field.
BLAMES = {"noninferiority": "its interval", "flips_previous": "repeatability"}

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
    real = {one.facts.cell.model for one in found.values() if one.facts.cell.weights != "synthetic"}
    for (model, scenario), members in sorted(by_row.items(), key=lambda item: (item[0][0] not in real, item[0])):
        tasks: list[str | None] = [*sorted({one.facts.cell.task for one in members if one.facts.cell.task})]
        tasks = tasks or [None]
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
                    tuple(fields.get((column.engine, column.recipe, column.deploy)) for column in columns),
                )
            )
    return tuple(drafts)


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
    isas = {one.facts.cell.isa for cells in latest.values() for one in cells.values()}
    made = []
    for place, isa in enumerate(sorted(isas, key=lambda name: wording.rank(name, wording.ISA_ORDER))):
        mine = {
            host: found
            for host, cells in latest.items()
            if (found := {key: one for key, one in cells.items() if one.facts.cell.isa == isa})
        }
        top = _top(one.facts for cells in mine.values() for one in cells.values())
        views: list[CellView] = []
        matrices = []
        for host, cells in mine.items():
            matrix, own = _matrix(host, cells, judgements.get(host), now=now, top=top)
            matrices.append(matrix)
            views += own
        best, peer = _fastest(views)
        slower = sum(one.alarm == "regression" for one in views)
        made.append(Panel(isa, wording.isa_title(isa), f"isa-{place}", tuple(matrices), best, peer, slower))
    return tuple(made)


def _top(facts: Iterable[Facts]) -> float:
    """The end of the scale of a panel's bars: the largest end of an interval."""
    ends = [one.speedup_ci[1] if one.speedup_ci else one.speedup for one in facts if one.speedup is not None]
    return max(ends, default=1.0)


def _matrix(
    host: str, cells: Mapping[str, Latest], judgement: Judgement | None, *, now: float, top: float
) -> tuple[Matrix, list[CellView]]:
    newest = judgement.header if judgement else max((one.header for one in cells.values()), key=lambda h: h.started_at)
    alarms = judgement.alarms() if judgement else {}
    views = {
        key: view(one, newest=newest.run_id, now=now, top=top, alarm=alarms.get(key)) for key, one in cells.items()
    }
    columns = _columns(one.facts for one in cells.values())
    engines: dict[str, int] = {}
    for column in columns:
        engines[column.engine] = engines.get(column.engine, 0) + 1
    matrix = Matrix(host_title(newest), host, columns, tuple(engines.items()), _rows(cells, columns, views))
    return matrix, list(views.values())


def _fastest(views: Iterable[CellView]) -> tuple[CellView | None, CellView | None]:
    """The fastest quantized cell of ours whose accuracy passed, and of the others under the same conditions."""

    def speed(one: CellView) -> float:
        return one.facts.speedup or 0.0

    passed = [one for one in views if one.state == "pass" and is_quantized(one.facts.cell) and one.facts.speedup]
    best = max((one for one in passed if one.facts.cell.engine == "int8"), key=speed, default=None)
    others = [one for one in passed if one.facts.cell.engine != "int8"]
    if best is not None:
        place = (best.facts.cell.model, best.facts.cell.scenario)
        others = [one for one in others if (one.facts.cell.model, one.facts.cell.scenario) == place]
    return best, max(others, key=speed, default=None)


def recent(latest: Mapping[str, Latest]) -> dict[str, Latest]:
    """The cells of one host that are young enough, by the age of the host's newest run, to stand on the overview."""
    newest = max((one.header.started_at for one in latest.values()), default=0.0)
    return {key: one for key, one in latest.items() if newest - one.header.started_at <= KEEP_S}
