"""The gate: chooses what a run is compared with, has it judged, and shows the verdicts. Rules: docs/gates.md."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from harness import baselines, history, known_changes, repetition, series_verdicts
from harness import verdicts as _verdicts
from harness.errors import UsageError
from harness.fingerprint import project_root
from harness.history import History, RunEntry
from harness.known_changes import Applied, KnownChange
from harness.records import LATEST, Run, Store
from harness.series_verdicts import Said
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
    verdict names its own). ``notes`` are sentences that a reader of the result should know. ``known`` are the entries
    of ``known_changes.toml`` that cells of the run have.
    """

    run: Run
    baseline: Baseline | None
    baseline_run: str | None
    verdicts: tuple[Verdict, ...]
    exit_code: int
    notes: tuple[str, ...] = ()
    known: tuple[Applied, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """The whole gate's outcome."""
        return OUTCOMES[self.exit_code]


def gate(
    store: Store,
    run_id: str = LATEST,
    baseline_id: str | None = None,
    rules: Rules | None = None,
    *,
    known: Sequence[KnownChange] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> GateReport:
    """Judge a run of ``store``.

    Args:
        store: where the runs are.
        run_id: the run to judge; ``latest`` is the one that started last.
        baseline_id: the run to compare with, and nothing but that one; None judges by the history of each cell, and
            chooses a run for those whose history is short, as docs/gates.md says.
        rules: the limits.
        known: changes that are meant; None reads the project's ``known_changes.toml``.
        tell: hears of long work in words.

    Raises:
        UsageError: the baseline's host is not comparable with the run's, or the baseline's host was disturbed, or the
            file of known changes is not of its form.
        AssetError: there is no such run.
        StoreError: a run cannot be read.
    """
    past = history.read(store, tell)
    if run_id == LATEST and past.entries:
        run_id = past.entries[-1].run_id
    run = store.load(run_id)
    mine = past.of_host(run.header.fingerprint).until(run.header)
    found, notes = _judged(store, run, mine, baseline_id, rules, known)
    return GateReport(
        run,
        found.baseline,
        found.baseline_run,
        found.verdicts,
        _verdicts.exit_code(found.verdicts, run),
        (*_notes(run, found.baseline_run, found.verdicts), *notes, *past.problems),
        found.known,
    )


@dataclass(frozen=True)
class _Found:
    """What the run was compared with, and the verdicts."""

    baseline: Baseline | None
    baseline_run: str | None
    verdicts: tuple[Verdict, ...]
    known: tuple[Applied, ...] = ()


def _judged(
    store: Store,
    run: Run,
    mine: History,
    baseline_id: str | None,
    rules: Rules | None,
    known: Sequence[KnownChange] | None,
) -> tuple[_Found, list[str]]:
    """Verdicts on ``run``, the newest of the comparable runs ``mine``; and notes."""
    if known is None:
        known = known_changes.read(project_root() / known_changes.FILE)
    if baseline_id is not None:
        named_one = baselines.explicit(store, run, baseline_id)
        found = _verdicts.judge(run, named_one, rules)
        return _Found(named_one, baseline_id, (*found, *_verdicts.judge_groups(run, found, rules))), []
    applied = known_changes.applying(known, mine, known_changes.descendants(project_root())) if known else ()
    chosen = baselines.choose(store, mine, rules)
    pinned = next((one for one in reversed(store.pinned()) if any(one == entry.run_id for entry in mine.entries)), None)
    by_history, groups = series_verdicts.judge(mine, Said(tuple(store.accepted()), pinned, applied))
    repeated, notes = repetition.judge(store, run, _not_known(chosen.where, mine, applied), rules)
    present = _verdicts.latest(run)
    further = {key: [*repeated.get(key, ()), *by_history.get(key, ())] for key in present}
    baseline = chosen.baseline(store, {key for key in present if key not in by_history})
    found = _verdicts.judge(run, baseline, rules, further)
    named = {one.cell_key for one in groups}
    short = [one for one in _verdicts.judge_groups(run, found, rules) if one.cell_key not in named]
    here = tuple(one for one in applied if any(key in present for key in one.keys))
    return _Found(baseline, chosen.run_id, (*found, *groups, *short), here), notes


def _not_known(
    where: Mapping[str, tuple[RunEntry, int]], mine: History, applied: Sequence[Applied]
) -> dict[str, tuple[RunEntry, int]]:
    """``where`` without the runs whose predictions are known to have changed since."""
    started = {entry.run_id: entry.header.started_at for entry in mine.entries}
    return {
        key: (entry, place)
        for key, (entry, place) in where.items()
        if not any(
            one.change.metric == "flips_previous" and key in one.keys and started[entry.run_id] < one.started_at
            for one in applied
        )
    }


def accept(store: Store, run_id: str, *, pin: bool = False) -> str:
    """Make a run the baseline of its host, and return its id (``latest`` is resolved).

    ``pin`` makes it the release that slow drift is measured from, too.

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
    if pin:
        store.pin(run.header.run_id)
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
    gains = sorted({verdict.cell_key for verdict in found if verdict.outcome == "improvement"})
    if gains:
        named = ", ".join(gains[:3]) + (f" and {len(gains) - 3} more" if len(gains) > 3 else "")
        notes.append(f"faster than before and not explained: {named}; make sure of the reason, then accept the run")
    strays = sum(verdict.metric == "speed" and series_verdicts.STRAY in verdict.reason for verdict in found)
    if strays:
        again = _verdicts.repeat_command(run.header.arguments)
        notes.append(f"{strays} cells lie off their level in this run alone, which decides nothing: run `{again}`")
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
    notes = [f"note: {note}" for note in (*_known_lines(report), *report.notes)]
    return [*notes, *failure_lines(report, results), headline(report)]


def _known_lines(report: GateReport) -> list[str]:
    return [
        f"known change: {one.change.series} {one.change.metric} since commit {one.change.commit[:12]} (run "
        f"{one.first_run}): {one.change.reason} ({one.change.who})"
        for one in report.known
    ]


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
        "known_changes": [
            {**dataclasses.asdict(one.change), "first_run": one.first_run, "cells": list(one.keys)}
            for one in report.known
        ],
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
    notes = (*_known_lines(report), *report.notes)
    if notes:
        lines += [*(f"* {_cell_text(note)}" for note in notes), ""]
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
