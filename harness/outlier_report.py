"""Outlier features of a model and their effect, as section 4 of the LLM.int8() paper measures them (arXiv 2208.07339).

The texts are a task's held-out ones. Where a model cannot read them (synthetic weights, no tokenizer) random tokens
take their place, and no metric is compared.

``<results>/analyses/outliers-<model>.json`` holds the fields of :class:`OutlierReport`: ``model``, ``task``,
``metric``, ``analysis`` (those of :class:`int8.outliers.OutlierAnalysis`, its ``features`` the most common first, with
``one_sided`` and ``values_per_sequence`` added), ``attention_mass``, ``value``, ``effects``, and what SmoothQuant does
to the same inputs: ``dimensions`` (the outlier features, then the largest others), and ``smoothing``, one object for
each group of linears that reads a hidden state: ``input``, ``layer`` (from 0), ``alpha`` (chosen for ``sq-static``),
``shifted``, and ``before`` and ``after``, the largest magnitude of each of ``dimensions`` over the calibration tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table

from harness import models, tasks
from harness.matrix import Scenario
from harness.sources import Sources

if TYPE_CHECKING:
    from harness.models import LoadedModel
    from int8.calibrate import ChannelStats
    from int8.outliers import OutlierAnalysis
    from int8.smooth import ActivationPlan

    Batch = dict[str, Any]

SEQ = 128
#: Draws of as many random features: what the effect of the outlier features is compared with.
CONTROLS = 3
#: Random tokens for a model that reads no text.
RANDOM_TEXTS = Scenario("offline", 8, SEQ)

#: Features whose magnitudes before and after smoothing are listed.
SHOWN = 24

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
class SmoothedInput:
    """What SmoothQuant makes of the hidden state that a group of linears reads.

    Attributes:
        input: the group's name.
        layer: from 0.
        alpha: strength that the search chose; None where it smooths nothing.
        shifted: how many channels it shifts.
        before, after: largest magnitudes of the report's ``dimensions``, as they are and after shift and factor.
    """

    input: str
    layer: int
    alpha: float | None
    shifted: int
    before: tuple[float, ...]
    after: tuple[float, ...]


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
    dimensions: tuple[int, ...] = ()
    smoothing: tuple[SmoothedInput, ...] = ()


def examine(
    model_name: str,
    task_name: str,
    limit: int,
    *,
    offline: bool = False,
    progress: Callable[[str], None] | None = None,
    sources: Sources | None = None,
) -> OutlierReport:
    """Analyse a model in FP32 on the first ``limit`` held-out texts of a task; ``sources`` name checkpoint and data.

    Raises:
        UsageError: unknown model or task.
        AssetError: weights or texts are missing.
        CalibrationError: the model has no layers that the analysis knows.
    """
    named = Sources() if sources is None else sources
    checkpoint = named.checkpoint(model_name, task_name)
    unfit = None if checkpoint else tasks.unsupported(task_name, model_name)
    tell = progress or (lambda text: None)
    head = None if unfit else tasks.head_of(task_name)
    source = None if checkpoint is None else checkpoint.location
    model = models.load(model_name, offline=offline, head=head, progress=progress, source=source)
    if unfit or model.tokenizer is None:
        tell(f"note: {unfit or f'model {model_name} has no tokenizer'}; random tokens are read, no metric is compared")
        return _examine_random(model, tell)
    seq, labels = min(SEQ, model.max_seq), None if checkpoint is None else checkpoint.labels
    data = named.data.get(task_name)
    task = tasks.load(task_name, model, offline=offline, progress=progress, data=data, labels=labels, seq=seq)
    return _examine_task(model, task, limit, tell)


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
        tell("choosing smoothing factors")
        shown, smoothing = _smoothing(model, task.calibration(), analysis)
    value = task.judge(regular, regular).value
    found = (analysis, masses[0], value, tuple(effects), shown, smoothing)
    return OutlierReport(model.name, task.name, task.metric, *found)


def _examine_random(model: LoadedModel, tell: Callable[[str], None]) -> OutlierReport:
    from int8 import outliers

    shape = dataclasses.replace(RANDOM_TEXTS, seq=min(SEQ, model.max_seq))
    batches = [models.batch_inputs(model, shape, seed=0)]
    analysis = outliers.analyse(model.module, batches)
    sets = _zeroed_sets(analysis)
    masses = _attention(model, batches, [(), *sets], tell)
    effects = (Effect(_name(i), chosen, masses[i + 1], None, None, None) for i, chosen in enumerate(sets))
    shown, smoothing = _smoothing(model, batches, analysis)
    return OutlierReport(model.name, None, None, analysis, masses[0], None, tuple(effects), shown, smoothing)


def _smoothing(
    model: LoadedModel, calibration: Iterable[Batch], analysis: OutlierAnalysis
) -> tuple[tuple[int, ...], tuple[SmoothedInput, ...]]:
    """The features to show, and what the search for ``sq-static`` makes of each hidden state that is analysed."""
    import torch

    from int8 import outliers, quantization, recipe

    layers = outliers.analysed_linears(model.module)
    linears = {name: linear for found in layers.values() for name, linear in found.items()}
    seen = quantization.statistics(model.module, calibration, accept=lambda name, _: name in linears)
    plans = quantization.plan_activations(linears, recipe.get("sq-static"), seen, 8)
    largest = torch.stack([stats.absmax for stats in seen.stats.values()]).amax(dim=0)
    others = [one for one in largest.argsort(descending=True).tolist() if one not in analysis.dimensions]
    shown = (*analysis.dimensions, *others)[: max(SHOWN, len(analysis.dimensions))]
    places = {name: place for place, found in enumerate(layers.values()) for name in found}
    groups = quantization.input_groups(seen)
    smoothed = (_smoothed(group, places[group[0]], seen.stats[group[0]], plans[group[0]], shown) for group in groups)
    return shown, tuple(smoothed)


def _smoothed(
    group: tuple[str, ...], layer: int, stats: ChannelStats, plan: ActivationPlan, shown: tuple[int, ...]
) -> SmoothedInput:
    from int8.sensitivity import group_name

    index = list(shown)
    low, high = (stats.low, stats.high) if plan.shift is None else (stats.low - plan.shift, stats.high - plan.shift)
    after = low.abs().maximum(high.abs())
    after = after if plan.factor is None else after / plan.factor
    shifted = 0 if plan.shift is None else int((plan.shift != 0).sum())
    before = stats.absmax[index].tolist()
    return SmoothedInput(group_name(group), layer, plan.alpha, shifted, tuple(before), tuple(after[index].tolist()))


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
        heads, causal = int(config.num_attention_heads), _is_causal(model)
        return outliers.attention_mass(model.module, batches, sets, heads=heads, causal=causal)
    except CalibrationError as error:
        tell(f"note: {error}")
        return [None] * len(sets)


def _is_causal(model: LoadedModel) -> bool:
    """Whether a token attends to earlier ones alone. Decoders are; transformers names their modules so."""
    return any("decoder" in name.split(".") for name, _ in model.module.named_modules())


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
    if report.smoothing:
        parts.append(_smoothing_table(report))
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


def _smoothing_table(report: OutlierReport) -> Table:
    table = Table(title="What SmoothQuant makes of the hidden states (sq-static)", title_justify="left")
    for column in ("read by", "alpha", "shifted", "largest before", "largest after", "outlier features after"):
        table.add_column(column, justify="left" if column == "read by" else "right", no_wrap=True)
    count = len(report.analysis.features)
    for one in report.smoothing:
        alpha = "" if one.alpha is None else f"{one.alpha:g}"
        after = [one.after[report.dimensions.index(place)] for place in report.analysis.dimensions] if count else []
        largest = f"{max(after):.2f}" if after else ""
        table.add_row(one.input, alpha, str(one.shifted), f"{max(one.before):.1f}", f"{max(one.after):.2f}", largest)
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
