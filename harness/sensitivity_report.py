"""How much each group of a model's linears costs at its output, per recipe: ``harness sensitivity MODEL``.

Activations are calibrated on a task's training texts, outputs compared on its held-out ones; no label is read. The file
``<results>/analyses/sensitivity-<model>.json`` holds::

    {"model", "task", "isa", "weight_bits", "texts",
     "recipes": [{"recipe", "total_db",
                  "groups": [{"name", "linears": [..], "alone_db", "without_db", "noise_share"}]}]}

SQNR in dB of the model's output: with one group quantized alone, with all but it, with all; null where it is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table

from harness import models, tasks
from harness.errors import UsageError
from int8 import recipe as recipes

if TYPE_CHECKING:
    from int8.sensitivity import Sensitivity

SEQ = 128
#: What is rated where nobody says otherwise: the recipes that the gate judges.
RECIPES = ("sq-static", "sq-dynamic")

#: Told what goes on, and how many of how many passes of the model are done.
Tell = Callable[[str, float, float], None]


@dataclass(frozen=True)
class SensitivityReport:
    """A model's groups under some recipes. ``weight_bits``: what the ISA's kernels take."""

    model: str
    task: str
    isa: str
    weight_bits: int
    found: tuple[Sensitivity, ...]


def check(names: Sequence[str]) -> tuple[recipes.Recipe, ...]:
    """The recipes called so. UsageError for one that gives all linears no INT8 format of their own.

    Raises:
        RecipeError: no such recipe.
    """
    found = tuple(recipes.get(name) for name in names)
    for one in found:
        if not one.quantized or one.budget_points is not None:
            raise UsageError(f"recipe {one.name} has no one INT8 format to rate; name others, such as sq-static")
    return found


def examine(
    model_name: str,
    task_name: str,
    names: Sequence[str],
    limit: int,
    tell: Tell,
    *,
    offline: bool = False,
) -> SensitivityReport:
    """Rate the groups of a model on the first ``limit`` held-out texts of a task.

    Raises:
        UsageError: unknown names, or a model that the task cannot judge.
        AssetError: weights or texts are missing.
        CalibrationError, QuantizationError: the model cannot be calibrated or quantized.
    """
    from int8 import isa as isas
    from int8 import quantization, sensitivity

    wanted = check(names)

    def say(text: str) -> None:
        tell(text, 0, 0)

    model = models.load(model_name, offline=offline, head=tasks.head_of(task_name), progress=say)
    seq = min(SEQ, model.max_seq)
    task = tasks.load(task_name, model, offline=offline, progress=say, seq=seq)
    isa = isas.effective()
    say(f"{model.name}: calibrating")
    linears = quantization.find_linears(model.module)
    seen = quantization.statistics(model.module, task.calibration())
    batches = [batch for _, batch in task.ragged(seq, limit)]
    found = []
    for place, recipe in enumerate(wanted):
        say(f"{recipe.name}: choosing smoothing and scales")
        weights = quantization.quantized_weights(linears, recipe, seen, isa=isa)

        def passed(done: int, total: int, place: int = place, name: str = recipe.name) -> None:
            tell(f"{name}: {done} of {total} passes", place * total + done, len(wanted) * total)

        found.append(sensitivity.measure(model.module, recipe.name, weights, seen, batches, passed))
    return SensitivityReport(
        model.name, task.name, isa, recipes.Recipe("bits", "dynamic").resolve_weight_bits(isa), tuple(found)
    )


def to_json(report: SensitivityReport) -> dict[str, Any]:
    """The report as its file has it; see the module."""
    from int8.sensitivity import group_name

    return {
        "model": report.model,
        "task": report.task,
        "isa": report.isa,
        "weight_bits": report.weight_bits,
        "texts": report.found[0].sequences if report.found else 0,
        "recipes": [
            {
                "recipe": one.recipe,
                "total_db": one.total_db,
                "groups": [
                    {
                        "name": group_name(group.linears),
                        "linears": list(group.linears),
                        "alone_db": group.alone_db,
                        "without_db": group.without_db,
                        "noise_share": group.noise_share,
                    }
                    for group in one.groups
                ],
            }
            for one in report.found
        ],
    }


def as_table(report: SensitivityReport) -> RenderableType:
    """The report for people: one line a group, three columns a recipe; shares of a tenth and more in bold."""
    from int8.sensitivity import group_name

    table = Table(
        title=f"{report.model} on {report.task}, {report.weight_bits}-bit weights ({report.isa}): SQNR of the output",
        title_justify="left",
    )
    table.add_column("linears that share an input", no_wrap=True)
    for one in report.found:
        for column in ("alone", "all but it", "of the noise"):
            table.add_column(f"{one.recipe}\n{column}", justify="right")
    for rows in zip(*(one.groups for one in report.found), strict=True):
        cells = [text for row in rows for text in (_db(row.alone_db), _db(row.without_db), _share(row.noise_share))]
        table.add_row(group_name(rows[0].linears), *cells)
    totals = ", ".join(f"{one.recipe} {_db(one.total_db)}" for one in report.found)
    return Group(table, f"All quantized: {totals}. {report.found[0].sequences} held-out texts.")


def _db(value: float) -> str:
    return f"{value:.1f} dB" if math.isfinite(value) else "exact" if value > 0 else "lost"


def _share(share: float) -> str:
    text = f"{share:.0%}"
    return f"[bold]{text}[/bold]" if share >= 0.1 else text
