"""A run's INT8 cells beside those of other runtimes, and which goals they meet: those of ``catalog/goals.toml``.

Everything here follows from the records of one run, in which all that is compared took turns, and from the host's
roofline where one was measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness import analyses, assets, stats
from harness.errors import UsageError
from harness.records import Record, Run, Speedup
from int8 import recipe as recipes
from int8.isa import NAMES as ISAS

#: Engines that ours is set against, in the table's order.
RIVALS = ("torchao", "openvino", "onnxruntime", "ctranslate2")
#: Our cell that ratios are of.
OURS = ("int8", "sq-static")
BASELINE = ("int8", "fp32")
_NOTHING = "-"

Outcome = Literal["met", "missed", "not measured", "no goal"]


@dataclass(frozen=True)
class Goal:
    """``least`` times as fast as another cell, by ISA. ``ours`` and ``over`` are (engine, recipe)."""

    models: tuple[str, ...]
    scenario: str
    ours: tuple[str, str]
    over: tuple[str, str]
    least: Mapping[str, float]

    @property
    def text(self) -> str:
        """The goal in words."""
        return f"{'/'.join(self.ours)} over {'/'.join(self.over)}"


@dataclass(frozen=True)
class PeakGoal:
    """A product of a model reaches ``least`` of the ISA's measured INT8 peak."""

    model: str
    scenario: str
    recipe: str
    m: int
    n: int
    k: int
    least: Mapping[str, float]

    @property
    def text(self) -> str:
        """The goal in words."""
        return f"linear M={self.m} N={self.n} K={self.k} of the INT8 peak"


@dataclass(frozen=True)
class Goals:
    """All goals."""

    ratios: tuple[Goal, ...]
    peak: PeakGoal


@dataclass(frozen=True)
class Judged:
    """A goal for one model and ISA, what was measured, and whether that is enough. Values are ratios."""

    text: str
    model: str
    scenario: str
    isa: str
    least: float | None
    measured: Speedup | None
    outcome: Outcome
    reason: str | None = None


def load_goals() -> Goals:
    """The catalog's goals."""
    return parse_goals(assets.catalog("goals"))


def roofline(results: Path, run: Run) -> Mapping[str, Any] | None:
    """What ``harness roofline`` measured on the run's host; None where it was not run, or its file is damaged."""
    path = analyses.path_of(results, "roofline", f"{load_goals().peak.model}-{run.header.fingerprint}")
    try:
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def parse_goals(table: Mapping[str, Any]) -> Goals:
    """Goals out of the catalog's table.

    Raises:
        UsageError: a field is missing or unknown, or an ISA does not exist.
    """
    try:
        ratios = tuple(
            Goal(**{**one, "models": tuple(one["models"]), "ours": _pair(one["ours"]), "over": _pair(one["over"])})
            for one in table["ratio"]
        )
        goals = Goals(ratios, PeakGoal(**table["peak"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"goals.toml is incomplete or wrong: {error}") from error
    unknown = {isa for least in (*(goal.least for goal in ratios), goals.peak.least) for isa in least} - set(ISAS)
    if unknown:
        raise UsageError(f"goals.toml names unknown ISAs: {', '.join(sorted(unknown))}")
    return goals


def _pair(text: str) -> tuple[str, str]:
    engine, recipe = text.split("/")
    return engine, recipe


class Cells:
    """The records of a run, by what tells cells apart. Only ``jit`` cells: peers have no other."""

    def __init__(self, run: Run) -> None:
        self._records = [record for record in run.records if record.cell.deploy == "jit"]

    def rows(self) -> list[tuple[str, str, str]]:
        """(model, scenario, ISA) in the run's order."""
        return list(dict.fromkeys((r.cell.model, r.cell.scenario, r.cell.isa) for r in self._records))

    def find(self, row: tuple[str, str, str], which: tuple[str, str]) -> Record | None:
        """The record of an (engine, recipe) in a row."""
        for record in self._records:
            cell = record.cell
            if (cell.model, cell.scenario, cell.isa) == row and (cell.engine, cell.recipe) == which:
                return record
        return None

    def fastest(self, row: tuple[str, str, str], engine: str) -> Record | None:
        """The engine's fastest quantized cell in a row; None where none was measured."""
        measured = [
            record
            for record in self._records
            if (record.cell.model, record.cell.scenario, record.cell.isa) == row
            and record.cell.engine == engine
            and recipes.get(record.cell.recipe).quantized
            and _median_s(record) is not None
        ]
        return min(measured, key=lambda record: _median_s(record) or 0.0, default=None)


def _median_s(record: Record | None) -> float | None:
    """Seconds of the median iteration of a cell that is ok."""
    if record is None or record.status != "ok" or record.timing.latency_s is None:
        return None
    return record.timing.latency_s.p50


def ratio(other: Record | None, ours: Record | None) -> Speedup | None:
    """How many times faster ours is; None where either was not measured."""
    if _median_s(other) is None or _median_s(ours) is None:
        return None
    assert other is not None and ours is not None
    return stats.speedup(other.timing, ours.timing)


def judge(run: Run, goals: Goals, roofline: Mapping[str, Any] | None = None) -> list[Judged]:
    """Every goal for each of its models that the run measured, under each ISA of the run.

    Args:
        roofline: the host's analysis as ``harness roofline`` wrote it, for the goal about the peak.
    """
    cells = Cells(run)
    rows = cells.rows()
    found = [
        _judge_ratio(goal, row, cells)
        for goal in goals.ratios
        for row in rows
        if row[0] in goal.models and row[1] == goal.scenario
    ]
    isas = list(dict.fromkeys(isa for _, _, isa in rows))
    return [*found, *(_judge_peak(goals.peak, isa, roofline) for isa in isas)]


def _judge_ratio(goal: Goal, row: tuple[str, str, str], cells: Cells) -> Judged:
    ours, other = cells.find(row, goal.ours), cells.find(row, goal.over)
    measured, least = ratio(other, ours), goal.least.get(row[2])
    reason = next(
        (_why_missing(name, one) for name, one in ((goal.ours, ours), (goal.over, other)) if _lacks(one)), None
    )
    return Judged(goal.text, *row, least, measured, _outcome(measured, least), reason)


def _lacks(record: Record | None) -> bool:
    return _median_s(record) is None


def _why_missing(which: tuple[str, str], record: Record | None) -> str:
    name = "/".join(which)
    return f"{name} is not in the run" if record is None else f"{name} {record.status}: {record.reason}"


def _judge_peak(goal: PeakGoal, isa: str, roofline: Mapping[str, Any] | None) -> Judged:
    fraction = peak_fraction(goal, isa, roofline)
    least = goal.least.get(isa)
    measured = None if fraction is None else Speedup(fraction)
    reason = None if measured else f"run harness roofline --model {goal.model} --isa {isa} --scenario {goal.scenario}"
    return Judged(goal.text, goal.model, goal.scenario, isa, least, measured, _outcome(measured, least), reason)


def peak_fraction(goal: PeakGoal, isa: str, roofline: Mapping[str, Any] | None) -> float | None:
    """Part of the peak that the product reached inside the model, its epilogue included; None if not measured."""
    for section in (roofline or {}).get("sections", ()):
        if (section["isa"], section["scenario"]) != (isa, goal.scenario):
            continue
        for recipe in section["recipes"]:
            for point in recipe["points"] if recipe["recipe"] == goal.recipe else ():
                same = (point["m"], point["n"], point["k"]) == (goal.m, goal.n, goal.k)
                if same and point["ops_per_s"] and point["peak"]:
                    return float(point["ops_per_s"] / point["peak"])
    return None


def _outcome(measured: Speedup | None, least: float | None) -> Outcome:
    if least is None:
        return "no goal"
    if measured is None:
        return "not measured"
    return "met" if measured.value >= least else "missed"


# --- printing ---------------------------------------------------------------------------------------------------------


def as_table(run: Run, goals: Goals, roofline: Mapping[str, Any] | None = None) -> RenderableType:
    """Median times beside each other with our ratios over them, then the goals, then what was not measured and why."""
    cells = Cells(run)
    judged = judge(run, goals, roofline)
    return Group(
        _times_table(run, cells),
        _goals_table(judged),
        *(Text(line) for line in _notes(run, judged)),
    )


def _times_table(run: Run, cells: Cells) -> Table:
    table = Table(
        title=f"run {run.header.run_id}: median ms of an iteration (and of the engine's own FP32), "
        f"and how many times faster {'/'.join(OURS)} is",
        title_justify="left",
    )
    for name in ("model", "scenario", "ISA"):
        table.add_column(name, no_wrap=True)
    for name in ("FP32", "sq-static", "sq-dynamic", *RIVALS, "over FP32", *(f"over {name}" for name in RIVALS)):
        table.add_column(name, justify="right")
    for row in cells.rows():
        table.add_row(*(Text(text) for text in times_row(row, cells)))
    return table


def times_row(row: tuple[str, str, str], cells: Cells) -> tuple[str, ...]:
    """One line of the table of times: a text for each column."""
    ours = cells.find(row, OURS)
    rivals = [cells.fastest(row, engine) for engine in RIVALS]
    own = [cells.find(row, which) for which in (BASELINE, OURS, ("int8", "sq-dynamic"))]
    return (
        *row,
        *(_ms(record) for record in own),
        *(_rival(record, cells.find(row, (engine, "fp32"))) for engine, record in zip(RIVALS, rivals, strict=True)),
        _times(ratio(own[0], ours)),
        *(_times(ratio(record, ours)) for record in rivals),
    )


def _ms(record: Record | None) -> str:
    seconds = _median_s(record)
    return _NOTHING if seconds is None else f"{seconds * 1e3:.4g}"


def _rival(record: Record | None, fp32: Record | None) -> str:
    """Median ms with the recipe, and of the engine's own FP32 where it has one."""
    if record is None:
        return _NOTHING
    return f"{_ms(record)} {record.cell.recipe}" + ("" if _lacks(fp32) else f" ({_ms(fp32)})")


def _times(found: Speedup | None) -> str:
    return _NOTHING if found is None else f"{found.value:.2f}x"


def _goals_table(judged: Sequence[Judged]) -> Table:
    table = Table("goal", "model", "scenario", "ISA", title="goals", title_justify="left")
    for name in ("at least", "measured"):
        table.add_column(name, justify="right")
    table.add_column("")
    for one in judged:
        least = _NOTHING if one.least is None else f"{one.least:g}"
        interval = "" if one.measured is None or one.measured.ci95 is None else _interval(one.measured.ci95)
        measured = _NOTHING if one.measured is None else f"{one.measured.value:.3g}{interval}"
        verdict = f"no goal for {one.isa}" if one.outcome == "no goal" else one.outcome
        table.add_row(*(Text(text) for text in (one.text, one.model, one.scenario, one.isa, least, measured, verdict)))
    return table


def _interval(bounds: tuple[float, float]) -> str:
    return f" [{bounds[0]:.3g}, {bounds[1]:.3g}]"


def _notes(run: Run, judged: Sequence[Judged]) -> Iterator[str]:
    counts = {outcome: sum(one.outcome == outcome for one in judged) for outcome in ("met", "missed", "not measured")}
    yield "goals: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    measured = {record.cell.isa for record in run.records}
    absent = [isa for isa in ("amx", "vnni") if isa not in measured]
    if absent:
        yield f"not judged: goals for {', '.join(absent)}, which this run has no cell for"
    for one in judged:
        if one.outcome == "not measured" and one.reason:
            yield f"not measured: {one.text} on {one.model}/{one.isa}: {one.reason}"
    for record in run.records:
        if record.status != "ok":
            yield f"{record.status}: {record.cell.key}: {record.reason}"
    yield from _soundness(run)


def _soundness(run: Run) -> Iterator[str]:
    """That each quantized cell computed the model: by its task where one judged, else by the output's cosine."""
    for record in run.records:
        if record.status != "ok" or not recipes.get(record.cell.recipe).quantized:
            continue
        accuracy, cosine = record.accuracy, record.evidence.fp32_cosine
        if accuracy is not None:
            yield f"{record.cell.key}: {accuracy.metric} {accuracy.value:.4f} ({accuracy.delta:+.4f} against FP32)"
        elif cosine is not None:
            yield f"{record.cell.key}: cosine to eager FP32 {cosine:.5f}"
