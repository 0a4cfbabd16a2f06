"""The gate: chooses what a run is compared with, has it judged, and shows the verdicts. Rules: docs/gates.md."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from harness import verdicts as _verdicts
from harness.errors import UsageError
from harness.records import LATEST, Run, RunHeader, Store
from harness.verdicts import Baseline, Outcome, Rules, Verdict

#: How an outcome of the whole gate is called, by exit code.
OUTCOMES: dict[int, Outcome] = {0: "pass", **{code: outcome for outcome, code in _verdicts.EXIT_CODES.items()}}
_STYLES: dict[Outcome, str] = {
    "pass": "green",
    "improvement": "bold green",
    "regression": "bold red",
    "failed": "bold red",
    "invalid": "bold magenta",
    "inconclusive": "yellow",
}
#: Marker by which a bot finds the comment that it wrote before.
MARKDOWN_MARKER = "<!-- harness gate -->"


@dataclass(frozen=True)
class GateReport:
    """What the gate found: the run, what it was compared with (None: nothing), every verdict and what they come to.

    ``baseline_run`` is the id of the run that the baseline starts from; single cells may come from an older one (each
    verdict names its own). ``notes`` are sentences that a reader of the result should know.
    """

    run: Run
    baseline: Baseline | None
    baseline_run: str | None
    verdicts: tuple[Verdict, ...]
    exit_code: int
    notes: tuple[str, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """The whole gate's outcome."""
        return OUTCOMES[self.exit_code]


def gate(store: Store, run_id: str = LATEST, baseline_id: str | None = None, rules: Rules | None = None) -> GateReport:
    """Judge a run of ``store``.

    Args:
        store: where the runs are.
        run_id: the run to judge; ``latest`` is the one that started last.
        baseline_id: the run to compare with; None chooses one as docs/gates.md says.
        rules: the limits.

    Raises:
        UsageError: the baseline's host is not comparable with the run's, or the baseline's host was disturbed.
        AssetError: there is no such run.
        StoreError: a run cannot be read.
    """
    listing = store.listing()
    if run_id == LATEST and listing.headers:
        run_id = listing.headers[-1].run_id
    run = store.load(run_id)
    if baseline_id is None:
        baseline, baseline_run = choose_baseline(store, run, listing.headers, rules)
    else:
        baseline, baseline_run = explicit_baseline(store, run, baseline_id), baseline_id
    found = _verdicts.judge(run, baseline, rules)
    notes = (*_notes(run, baseline_run, found), *listing.problems)
    return GateReport(run, baseline, baseline_run, tuple(found), _verdicts.exit_code(found, run), notes)


# --- the baseline -----------------------------------------------------------------------------------------------------


def comparable(one: RunHeader, other: RunHeader) -> bool:
    """True if times of the two runs may be compared: the hosts' comparable fields are the same."""
    return one.fingerprint == other.fingerprint


def explicit_baseline(store: Store, run: Run, baseline_id: str) -> Baseline:
    """The measured cells of the run called ``baseline_id``. Raises as :func:`gate`."""
    other = store.load(baseline_id)
    if not comparable(other.header, run.header):
        raise UsageError(
            f"run {other.header.run_id} is no baseline for run {run.header.run_id}: it was measured on another host "
            f"({_host_difference(other.header, run.header)}); choose a run of the same host, or leave --baseline out"
        )
    if other.header.invalid_reason is not None:
        raise UsageError(
            f"run {other.header.run_id} is no baseline: its host was disturbed ({other.header.invalid_reason}); "
            "choose another run, or leave --baseline out"
        )
    return Baseline.of(other)


def _host_difference(one: RunHeader, other: RunHeader) -> str:
    """Which host fields tell two hosts apart, in a few words."""
    for name in ("cpu_model", "cpu", *sorted(one.host)):
        if name in one.host and name in other.host and one.host[name] != other.host[name]:
            return f"{name}: {one.host[name]} against {other.host[name]}"
    return f"fingerprint {one.fingerprint} against {other.fingerprint}"


def choose_baseline(
    store: Store, run: Run, headers: Sequence[RunHeader], rules: Rules | None = None
) -> tuple[Baseline | None, str | None]:
    """What ``run`` is compared with where the caller names nothing, and the run that it starts from.

    The comparable run accepted last; else the newest earlier comparable one that passed; cells which that lacks are
    taken from the newest run that passed and has them (docs/gates.md, "Which baseline"). ``headers``: the store's runs.
    """
    earlier = [other for other in headers if comparable(other, run.header) and _is_before(other, run.header)]
    accepted = _accepted_run(store, run, {other.run_id for other in earlier})
    if accepted is None:
        return _newest_passed(store, earlier, None, rules)
    later = [other for other in earlier if _is_before(accepted.header, other)]
    baseline, _ = _newest_passed(store, later, accepted, rules)
    return baseline, accepted.header.run_id


def _accepted_run(store: Store, run: Run, earlier: set[str]) -> Run | None:
    """The run accepted last among ``run`` itself and the ``earlier`` ones whose host was not disturbed."""
    for run_id in reversed(store.accepted()):
        if run_id == run.header.run_id:
            return run
        if run_id in earlier:
            found = store.load(run_id)
            if found.header.invalid_reason is None:
                return found
    return None


def _is_before(one: RunHeader, other: RunHeader) -> bool:
    return (one.started_at, one.run_id) < (other.started_at, other.run_id)


def _newest_passed(
    store: Store, headers: Iterable[RunHeader], accepted: Run | None, rules: Rules | None
) -> tuple[Baseline | None, str | None]:
    """Each cell's newest record among those runs of ``headers`` (oldest first) that passed, and the newest such run.

    Each run is judged against the ones before it, as :func:`gate` does. Cells of ``accepted`` stay as they are.
    """
    fixed = Baseline.of(accepted) if accepted else Baseline({}, {})
    records, known = dict(fixed.records), dict(fixed.headers)
    newest = None
    for header in headers:
        candidate = store.load(header.run_id)
        before = Baseline(records, known) if known else None
        if _verdicts.exit_code(_verdicts.judge(candidate, before, rules), candidate) != 0:
            continue
        newest = header.run_id
        own = Baseline.of(candidate)
        records = {**records, **own.records, **fixed.records}
        known = {**known, **own.headers}
    return (Baseline(records, known) if known else None), newest


def accept(store: Store, run_id: str) -> str:
    """Make a run the baseline of its host, and return its id (``latest`` is resolved).

    Raises:
        UsageError: its host was disturbed, or it measured nothing: it could not be compared with.
        AssetError, StoreError: as :meth:`Store.accept`.
    """
    run = store.load(run_id)
    if run.header.invalid_reason is not None:
        raise UsageError(
            f"run {run.header.run_id} cannot be accepted: its host was disturbed ({run.header.invalid_reason}); "
            "measure again on a quiet host"
        )
    if not Baseline.of(run).records:
        raise UsageError(f"run {run.header.run_id} cannot be accepted: no cell of it was measured; run again")
    store.accept(run.header.run_id)
    return run.header.run_id


def _notes(run: Run, baseline_run: str | None, found: Sequence[Verdict]) -> list[str]:
    notes = []
    if baseline_run is None:
        notes.append("no baseline: this host has no earlier run that passed, so speed is not compared")
    elif baseline_run == run.header.run_id:
        notes.append("the run is its own baseline: its speed is accepted as it is")
    if not any(_verdicts.is_gated(record.cell, run.header) for record in run.records):
        notes.append("no cell of this run is gated: nothing but the run as a whole was decided")
    skipped = sum(record.status == "skipped" for record in _verdicts.latest(run).values())
    if skipped:
        notes.append(f"{skipped} cells were skipped (`harness show` has the reasons)")
    gains = [verdict for verdict in found if verdict.outcome == "improvement"]
    if gains:
        notes.append(f"{len(gains)} cells are faster than the baseline by more than the limit: make sure of the reason")
    return notes


# --- how it is shown --------------------------------------------------------------------------------------------------


def shown(report: GateReport) -> list[Verdict]:
    """The verdicts worth a line, the gravest gated ones first. Of a cell's passes only those with a number are."""
    rank = {outcome: position for position, outcome in enumerate(_verdicts.EXIT_CODES)}
    lines = [item for item in report.verdicts if not item.good or item.value is not None or item.metric == "speed"]
    return sorted(lines, key=lambda item: (item.good, not item.gated, rank.get(item.outcome, len(rank))))


def headline(report: GateReport) -> str:
    """The result in one line."""
    gated = [verdict for verdict in report.verdicts if verdict.gated and not verdict.good]
    against = f"against run {report.baseline_run}" if report.baseline_run else "without a baseline"
    count = f"{len(gated)} gated verdicts are not a pass" if gated else "every gated verdict is a pass"
    return f"gate: {report.outcome} (exit {report.exit_code}): run {report.run.header.run_id} {against}: {count}"


def failure_lines(report: GateReport, results: str | None = None) -> list[str]:
    """For each gated verdict that is not a pass: what is wrong, and under it the exact commands that go on from it.

    ``results`` is the store's folder where it is not the default one; commands then name it.
    """
    lines: list[str] = []
    seen: set[str] = set()
    for verdict in shown(report):
        if verdict.good or not verdict.gated:
            continue
        lines.append(f"{verdict.outcome}: {verdict.cell_key} {verdict.metric}: {verdict.reason}")
        for purpose, command in _verdicts.commands(verdict, report.run.header.run_id):
            line = f"  {purpose}: {with_results(command, results)}"
            if line not in seen or purpose != "repeat":
                lines.append(line)
            seen.add(line)
    return lines


def with_results(command: str, results: str | None) -> str:
    """``command`` with the store's folder if that is not the default one; a replay takes none, as it reads no run."""
    if results is None or "--results" in command or command.startswith("harness replay"):
        return command
    return f"{command} --results {_verdicts.quoted(results)}"


def table(report: GateReport, results: str | None = None) -> Group:
    """The report as one thing to print: the table, and the lines of :func:`closing_lines`, which a narrow console
    breaks; :func:`as_text` keeps them whole."""
    return Group(*_parts(report, results))


def as_text(report: GateReport, console: Console, results: str | None = None) -> str:
    """The report as ``console`` would print it, except that the lines below the table are never broken: their commands
    are there to be copied."""
    with console.capture() as captured:
        for part in _parts(report, results):
            console.print(part, soft_wrap=isinstance(part, Text))
    return captured.get().rstrip("\n")


def closing_lines(report: GateReport, results: str | None = None) -> list[str]:
    """What follows the table: notes, failures with their commands, and last the result."""
    return [*(f"note: {note}" for note in report.notes), *failure_lines(report, results), headline(report)]


def _parts(report: GateReport, results: str | None) -> list[Table | Text]:
    *lines, result = closing_lines(report, results)
    rows: list[Table | Text] = [_grid(report), Text("")] if shown(report) else []
    return [*rows, *(Text(line) for line in lines), Text(result, style=_STYLES[report.outcome])]


def _grid(report: GateReport) -> Table:
    grid = Table(show_edge=False, pad_edge=False)
    for column in ("cell", "metric", "verdict"):
        grid.add_column(column, overflow="fold")
    grid.add_column("gated")
    for column in ("value", "limit"):
        grid.add_column(column, justify="right")
    grid.add_column("reason", overflow="fold")
    for verdict in shown(report):
        grid.add_row(
            Text(verdict.cell_key),
            verdict.metric,
            Text(verdict.outcome, style=_STYLES[verdict.outcome]),
            "yes" if verdict.gated else "no",
            _number(verdict.value),
            _number(verdict.limit),
            Text(verdict.reason),
        )
    return grid


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def to_json(report: GateReport, results: str | None = None) -> dict[str, Any]:
    """The report as plain JSON values: run, baseline, outcome, exit code, notes and every verdict with its commands.

    A number that is not finite becomes null, since JSON has none.
    """
    header = report.run.header
    return {
        "schema_version": 1,
        "run_id": header.run_id,
        "commit": header.commit,
        "fingerprint": header.fingerprint,
        "baseline_run": report.baseline_run,
        "outcome": report.outcome,
        "exit_code": report.exit_code,
        "notes": list(report.notes),
        "verdicts": [_verdict_json(verdict, header.run_id, results) for verdict in report.verdicts],
    }


def _verdict_json(verdict: Verdict, run_id: str, results: str | None) -> dict[str, Any]:
    fields = {name: _plain(value) for name, value in dataclasses.asdict(verdict).items()}
    if verdict.command is not None:
        fields["command"] = with_results(verdict.command, results)
    found = _verdicts.commands(verdict, run_id)
    return {**fields, "commands": {purpose: with_results(command, results) for purpose, command in found}}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_markdown(report: GateReport, results: str | None = None, most: int = 50) -> str:
    """The report as a comment for a pull request or an issue: result, table of at most ``most`` lines, commands."""
    lines = [MARKDOWN_MARKER, f"### {_cell_text(headline(report))}", ""]
    rows = shown(report)
    if rows:
        lines += ["| cell | metric | verdict | gated | value | limit | reason |", "|---|---|---|---|--:|--:|---|"]
        lines += [_markdown_row(verdict) for verdict in rows[:most]]
        if len(rows) > most:
            lines += ["", f"{len(rows) - most} more lines are left out."]
        lines.append("")
    if report.notes:
        lines += [*(f"* {_cell_text(note)}" for note in report.notes), ""]
    failures = failure_lines(report, results)
    if failures:
        lines += ["```", *failures[: 4 * most], "```"]
    return "\n".join(lines).rstrip("\n") + "\n"


def _markdown_row(verdict: Verdict) -> str:
    outcome = verdict.outcome if verdict.good or not verdict.gated else f"**{verdict.outcome}**"
    cells = (
        f"`{verdict.cell_key}`",
        verdict.metric,
        outcome,
        "yes" if verdict.gated else "no",
        _number(verdict.value),
        _number(verdict.limit),
        _cell_text(verdict.reason),
    )
    return "| " + " | ".join(cells) + " |"


def _cell_text(text: str) -> str:
    """``text`` so that it stays inside one cell of a Markdown table and starts no markup of its own."""
    for character in "\\|<>*_`":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
