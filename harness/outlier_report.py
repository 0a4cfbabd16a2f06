"""Outlier features of a model and their effect, as section 4 of the LLM.int8() paper measures them (arXiv 2208.07339).

The texts are a task's held-out ones. Where a model cannot read them (synthetic weights, no tokenizer) random tokens
take their place, and no metric is compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table

from harness import models, tasks
from harness.matrix import Scenario

if TYPE_CHECKING:
    from harness.models import LoadedModel
    from int8.outliers import OutlierAnalysis

    Batch = dict[str, Any]

SEQ = 128
#: Draws of as many random features: what the effect of the outlier features is compared with.
CONTROLS = 3
#: Random tokens for a model that reads no text.
RANDOM_TEXTS = Scenario("offline", 8, SEQ)

_OUTLIERS = "outlier features"
_RANDOM = "random features"


@dataclass(frozen=True)
class Effect:
    """What zeroing some features does.

    Attributes:
        zeroed: ``outlier features``, or ``random features``: as many of the others.
        dimensions: which.
        attention_mass: mean top-1 softmax probability, each layer altered by itself; 0 to 1.
        value: the task's metric, the features zeroed throughout; None without a task.
        flips: share of examples whose prediction changes; None without a task.
        sqnr_db: of the outputs; None without a task.
    """

    zeroed: str
    dimensions: tuple[int, ...]
    attention_mass: float | None
    value: float | None
    flips: float | None
    sqnr_db: float | None


@dataclass(frozen=True)
class OutlierReport:
    """The analysis of one model on one task's texts.

    ``attention_mass`` and ``value`` are those of the model as it is; the mass is None for attention that the analysis
    does not know. ``task`` and ``metric`` are None where random tokens were read.
    """

    model: str
    task: str | None
    metric: str | None
    analysis: OutlierAnalysis
    attention_mass: float | None
    value: float | None
    effects: tuple[Effect, ...]


def examine(
    model_name: str, task_name: str, limit: int, *, offline: bool = False, progress: Callable[[str], None] | None = None
) -> OutlierReport:
    """Analyse a model in FP32 on the first ``limit`` held-out texts of a task.

    Raises:
        UsageError: unknown model or task.
        AssetError: weights or texts are missing.
        CalibrationError: the model has no layers that the analysis knows.
    """
    unfit = tasks.unsupported(task_name, model_name)
    tell = progress or (lambda text: None)
    head = None if unfit else tasks.head_of(task_name)
    model = models.load(model_name, offline=offline, head=head, progress=progress)
    if unfit or model.tokenizer is None:
        tell(f"note: {unfit or f'model {model_name} has no tokenizer'}; random tokens are read, no metric is compared")
        return _examine_random(model, tell)
    return _examine_task(model, tasks.load(task_name, model, offline=offline, progress=progress), limit, tell)


def _examine_task(model: LoadedModel, task: tasks.Task, limit: int, tell: Callable[[str], None]) -> OutlierReport:
    from int8 import outliers

    seq, count = min(SEQ, model.max_seq), task.size(limit)

    def outputs() -> tasks.Floats:
        return tasks.base.collect(task, model.module, task.ragged(seq, limit), count)

    with tasks.base.plain_fp32():
        tell(f"reading {count} texts of {task.name}")
        analysis = outliers.analyse(model.module, _only_batches(task, seq, limit))
        sets = _zeroed_sets(analysis)
        masses = _attention(model, list(_only_batches(task, seq, limit)), [(), *sets], tell)
        regular = outputs()
        effects = []
        for place, dimensions in enumerate(sets):
            tell(f"zeroing {len(dimensions)} {_name(place)}")
            with outliers.zeroed(model.module, dimensions):
                judged = task.judge(outputs(), regular)
            mass = masses[place + 1]
            effects.append(Effect(_name(place), dimensions, mass, judged.value, judged.flips, judged.sqnr_db))
    value = task.judge(regular, regular).value
    return OutlierReport(model.name, task.name, task.metric, analysis, masses[0], value, tuple(effects))


def _examine_random(model: LoadedModel, tell: Callable[[str], None]) -> OutlierReport:
    from int8 import outliers

    shape = dataclasses.replace(RANDOM_TEXTS, seq=min(SEQ, model.max_seq))
    batches = [models.batch_inputs(model, shape, seed=0)]
    analysis = outliers.analyse(model.module, batches)
    sets = _zeroed_sets(analysis)
    masses = _attention(model, batches, [(), *sets], tell)
    effects = (Effect(_name(i), chosen, masses[i + 1], None, None, None) for i, chosen in enumerate(sets))
    return OutlierReport(model.name, None, None, analysis, masses[0], None, tuple(effects))


def _only_batches(task: tasks.Task, seq: int, limit: int) -> Iterator[Batch]:
    return (batch for _, batch in task.ragged(seq, limit))


def _zeroed_sets(analysis: OutlierAnalysis) -> list[tuple[int, ...]]:
    """The outlier features, then the controls; empty where there are no outlier features."""
    from int8 import outliers

    found = analysis.dimensions
    if not found:
        return []
    size = analysis.hidden_size
    return [found, *(outliers.random_dimensions(size, found, len(found), seed) for seed in range(CONTROLS))]


def _name(place: int) -> str:
    return _OUTLIERS if place == 0 else _RANDOM


def _attention(
    model: LoadedModel, batches: Sequence[Batch], sets: Sequence[tuple[int, ...]], tell: Callable[[str], None]
) -> Sequence[float | None]:
    from int8 import outliers
    from int8.errors import CalibrationError

    config: Any = model.module.backbone.config
    try:
        return outliers.attention_mass(model.module, batches, sets, heads=int(config.num_attention_heads))
    except CalibrationError as error:
        tell(f"note: {error}")
        return [None] * len(sets)


def to_json(report: OutlierReport) -> dict[str, Any]:
    """The report's fields as JSON's kinds; names are those of the dataclasses."""
    data = dataclasses.asdict(report)
    data["analysis"]["one_sided"] = report.analysis.one_sided
    data["analysis"]["values_per_sequence"] = report.analysis.values_per_sequence
    return data


def as_table(report: OutlierReport) -> RenderableType:
    """The report for people."""
    parts: list[RenderableType] = [_summary(report)]
    if report.analysis.features:
        parts += [_features(report), _effects(report)]
    return Group(*parts)


def _summary(report: OutlierReport) -> str:
    found = report.analysis
    count = len(found.features)
    return (
        f"{report.model}: {count} outlier feature{'s' if count != 1 else ''} of {found.hidden_size} "
        f"({found.one_sided} one-sided, {found.values_per_sequence:.1f} values a sequence): magnitude at least "
        f"{found.magnitude:g} in {found.min_layer_share:.0%} of {found.layers} layers and in "
        f"{found.min_position_share:.0%} of positions.\n"
        f"Looked at {found.sequences} sequences ({found.tokens} tokens) of {report.task or 'random tokens'} in "
        f"{found.hidden_states} hidden states. {found.reached} features reach {found.magnitude:g} anywhere; the "
        f"largest magnitude of one that is no outlier feature is {found.largest_other:.1f}."
    )


def _features(report: OutlierReport) -> Table:
    table = Table(title="Outlier features, the most common first", title_justify="left")
    for column in ("feature", "layers", "positions", "values a sequence", "quartiles", "range", "one-sided"):
        table.add_column(column, justify="left" if column == "one-sided" else "right")
    for feature in report.analysis.features:
        table.add_row(
            str(feature.dimension),
            f"{feature.layers} ({feature.layer_share:.0%})",
            f"{feature.position_share:.1%}",
            f"{feature.values_per_sequence:.1f}",
            "  ".join(f"{value:.1f}" for value in feature.quartiles),
            f"{feature.low:.1f} to {feature.high:.1f}",
            "yes" if feature.one_sided else "no",
        )
    return table


def _effects(report: OutlierReport) -> Table:
    table = Table(title="Effect of zeroing them, and as many random others", title_justify="left")
    for column in ("zeroed", "top-1 attention mass", report.metric or "metric", "flips", "SQNR dB"):
        table.add_column(column, justify="left" if column == "zeroed" else "right")
    table.add_row("nothing", _percent(report.attention_mass), _percent(report.value), "", "")
    for effect in report.effects:
        sqnr = "" if effect.sqnr_db is None else f"{effect.sqnr_db:.1f}"
        row = (_percent(effect.attention_mass), _percent(effect.value), _percent(effect.flips), sqnr)
        count = len(effect.dimensions)
        table.add_row(f"{count} {effect.zeroed if count != 1 else effect.zeroed.removesuffix('s')}", *row)
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
