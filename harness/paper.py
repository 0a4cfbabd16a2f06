"""A run's INT8 cells beside what the paper reports; its values are ``catalog/paper.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness import assets, verdicts
from harness.records import Accuracy, Cell, Record, Run

COLUMNS = (
    "model",
    "task",
    "engine",
    "recipe",
    "ISA",
    "scenario",
    "FP32",
    "INT8",
    "loss",
    "speed-up",
    "paper's FP32",
    "paper's INT8",
    "paper's loss",
    "paper's speed-up",
)
_RIGHT_FROM = COLUMNS.index("FP32")
_UNKNOWN = "-"


def as_table(run: Run) -> RenderableType:
    """The quantized cells with their metric and speed-up, in percent and over the run's own FP32.

    A speed-up is shown only where accuracy passed. What the paper does not say is a dash.
    """
    values = assets.catalog("paper")
    found = verdicts.judge(run)
    table = Table(title=f"run {run.header.run_id} beside {values['source']}", title_justify="left")
    for place, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if place >= _RIGHT_FROM else "left", no_wrap=True)
    records = [record for record in run.records if verdicts.is_quantized(record.cell)]
    for record in records:
        speedup = verdicts.published_speedup(record, found)
        table.add_row(*(Text(text) for text in row(record, None if speedup is None else speedup.value, values)))
    failed = [Text(f"{one.status}: {one.cell.key}: {one.reason}") for one in records if one.status != "ok"]
    return Group(table, *failed, *(Text(note) for note in _notes(values)))


def row(record: Record, speedup: float | None, values: Mapping[str, Any]) -> tuple[str, ...]:
    """One line of the table, a text for each of ``COLUMNS``."""
    cell = record.cell
    scores = _scores(cell, values)
    return (
        cell.model,
        cell.task or _UNKNOWN,
        cell.engine,
        cell.recipe,
        cell.isa,
        cell.scenario,
        *_own(record.accuracy),
        _UNKNOWN if speedup is None else f"{speedup:.2f}x",
        *scores,
        _paper_speedup(cell, values),
    )


def _own(accuracy: Accuracy | None) -> tuple[str, str, str]:
    """FP32's metric, the cell's, and the loss in points; for questions with the exact matches."""
    if accuracy is None:
        return _UNKNOWN, _UNKNOWN, _UNKNOWN
    fp32 = _percent(accuracy.metric, accuracy.fp32_value, accuracy.others.get("fp32_exact_match"))
    own = _percent(accuracy.metric, accuracy.value, accuracy.others.get("exact_match"))
    return fp32, own, f"{round(-100 * accuracy.delta, 2) + 0.0:.2f}"  # + 0.0: never "-0.00"


def _percent(metric: str, value: float, exact: float | None) -> str:
    name = {"f1": "F1 ", "accuracy": ""}.get(metric, f"{metric} ")
    return f"{name}{100 * value:.2f}" + ("" if exact is None else f", EM {100 * exact:.2f}")


def _scores(cell: Cell, values: Mapping[str, Any]) -> tuple[str, str, str]:
    """The paper's FP32, INT8 and loss for a cell; only a bound of the loss where it names no scores."""
    for known in values.get("scores", ()):
        if (known["model"], known["task"], known["recipe"]) == (cell.model, cell.task, cell.recipe):
            return f"{known['fp32']:.2f}", f"{known['int8']:.2f}", f"{known['fp32'] - known['int8']:.2f}"
    judged = _is_the_papers(cell, values) and cell.task in ("squad", "mnli")
    return _UNKNOWN, _UNKNOWN, f"< {values['max_loss']:g}" if judged else _UNKNOWN


def _paper_speedup(cell: Cell, values: Mapping[str, Any]) -> str:
    """The paper's figure for this very model, method and kind of machine, else its range over models and methods."""
    for known in values["speedups"]:
        if (known["model"], known["recipe"], known["isa"]) == (cell.model, cell.recipe, cell.isa):
            return f"{known['value']:.2f}x"
    if cell.isa not in values["ranges"] or not _is_the_papers(cell, values):
        return _UNKNOWN
    low, high = values["ranges"][cell.isa]
    return f"{low:g}-{high:g}x"


def _is_the_papers(cell: Cell, values: Mapping[str, Any]) -> bool:
    """Whether the paper measured this method on a model of this name."""
    return cell.recipe in values["recipes"] and cell.model in values["models"]


def _notes(values: Mapping[str, Any]) -> list[str]:
    machines = ", ".join(f"{machine} beside {isa}" for isa, machine in values["platforms"].items())
    return [
        f"{values['source']}: {machines}; a range is over all its models and methods; speed-ups are over FP32.",
        "Metrics in percent, losses in points. A dash: not measured, not published because accuracy did not pass, or "
        "not in the paper's text.",
    ]
