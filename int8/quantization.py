"""From a floating-point model to a quantized one: which linears, with which factors and scales."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler

from int8 import isa as isa_module
from int8 import recipe as recipes
from int8 import schemes
from int8.calibrate import Batch, Calibration, ChannelStats, collect
from int8.errors import CalibrationError, QuantizationError
from int8.recipe import Recipe
from int8.smooth import ActivationPlan, plan, search
from int8.tensor import Int8Weight, WeightBits

#: Decides by qualified name and module whether a linear is quantized.
LinearFilter = Callable[[str, nn.Linear], bool]

_IN_A_LAYER = re.compile(r"(^|\.)\d+(\.|$)")


def encoder_linear(name: str, module: nn.Linear) -> bool:
    """The default filter: linears inside a numbered layer. Poolers and task heads lie outside and stay as they are."""
    return bool(_IN_A_LAYER.search(name))


def find_linears(model: nn.Module, accept: LinearFilter = encoder_linear) -> dict[str, nn.Linear]:
    """Linears of ``model`` that ``accept`` takes, by qualified name; a shared module appears once.

    Raises:
        QuantizationError: there is none.
    """
    every = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    found = {name: module for name, module in every.items() if accept(name, module)}
    if not found:
        hint = (
            f"none of its {len(every)} nn.Linear lies in a numbered layer; "
            "pass accept=lambda name, module: True or a filter of your own"
            if every
            else "it has no nn.Linear (Conv1D models keep their weights elsewhere and are not supported)"
        )
        raise QuantizationError(f"{type(model).__name__} has 0 linears to quantize: {hint}")
    return found


def quantize(
    model: nn.Module,
    recipe: Recipe | str,
    calibration: Iterable[Batch] | Calibration | None = None,
    *,
    accept: LinearFilter = encoder_linear,
    isa: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> nn.Module:
    """A quantized copy of ``model``; the original is left as it is.

    Args:
        model: an FP32 or BF16 model in eval mode.
        recipe: a recipe or its name (see :mod:`int8.recipe`).
        calibration: dicts of the model's inputs, a few hundred real examples; recipes whose ``needs_calibration`` is
            true need it. What :func:`statistics` gathered from them does as well, for all recipes but ``auto``.
        accept: which linears to quantize; by default those inside encoder layers.
        isa: the ISA the weights are quantized for, by default this process's; it decides 8- or 7-bit weights.
        progress: called with the number of calibration batches done.

    Returns:
        A model whose chosen linears hold :class:`int8.tensor.Int8Weight`. Linears that no calibration token reached
        stay in floating point; :func:`quantized_modules` lists what is quantized.

    Raises:
        QuantizationError: no linear found, or one that cannot be quantized.
        CalibrationError: no, empty or bad calibration data.
    """
    chosen = recipes.get(recipe) if isinstance(recipe, str) else recipe
    if not chosen.quantized:
        raise QuantizationError(
            f"recipe {chosen.name!r} quantizes nothing; pass the model to int8.compile with recipe={chosen.name!r}"
        )
    if model.training:
        raise QuantizationError("the model is in training mode; call model.eval() first")
    linears = find_linears(model, accept)
    target = isa_module.resolve(isa) if isa else isa_module.effective()
    if chosen.budget_points is not None:
        from int8 import auto

        return auto.quantize(model, chosen, linears, _batches(chosen, calibration), isa=target, progress=progress)
    seen = _calibrate(model, linears, chosen, calibration, progress)
    return with_weights(model, linears, quantized_weights(linears, chosen, seen, isa=target), chosen)


def statistics(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    accept: LinearFilter = encoder_linear,
    progress: Callable[[int], None] | None = None,
) -> Calibration:
    """What calibration sees of ``model``, to be gathered once and given to :func:`quantize` for several recipes.

    Raises:
        QuantizationError, CalibrationError: as :func:`quantize`.
    """
    return collect(model, find_linears(model, accept), batches, progress)


#: A quantized weight and the bias that goes with it; None keeps the linear's own.
WeightAndBias = tuple[Int8Weight, Tensor | None]


def quantized_weights(
    linears: Mapping[str, nn.Linear], recipe: Recipe, seen: Calibration | None, *, isa: str
) -> dict[str, WeightAndBias]:
    """The quantized weight of each linear that ``recipe`` quantizes: all that calibration reached."""
    plans = plan_activations(linears, recipe, seen, recipe.resolve_weight_bits(isa))
    found: dict[str, WeightAndBias] = {}
    for name, activation in plans.items():
        stats = None if seen is None else seen.stats[name]
        weight = _quantize_one(name, linears[name].weight, activation, recipe, isa, stats)
        found[name] = weight, _shifted_bias(linears[name], activation)
    return found


def with_weights(
    model: nn.Module, linears: Mapping[str, nn.Linear], weights: Mapping[str, WeightAndBias], recipe: Recipe
) -> nn.Module:
    """A copy of ``model`` whose linears hold ``weights``; the original is left as it is."""
    quantized = _copy_without_weights(model, [linears[name] for name in weights])
    modules = dict(quantized.named_modules())
    for name, (weight, bias) in weights.items():
        set_weight(cast(nn.Linear, modules[name]), weight, bias)
    quantized.int8_recipe = recipe  # type: ignore[assignment]
    return quantized


def weight_bits(model: nn.Module) -> int | None:
    """The most bits that a quantized weight of ``model`` uses: 7 or 8; None if nothing is quantized."""
    weights = [cast(Int8Weight, module.weight) for module in quantized_modules(model).values()]
    return max((weight.bits for weight in weights), default=None)


def quantized_modules(model: nn.Module) -> dict[str, nn.Linear]:
    """Linears of ``model`` whose weight is quantized, by qualified name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and isinstance(module.weight, Int8Weight)
    }


def plan_activations(
    linears: Mapping[str, nn.Linear], recipe: Recipe, calibration: Calibration | None, bits: WeightBits
) -> dict[str, ActivationPlan]:
    """The activation plan of each linear that can be quantized: those that calibration reached, all without one.

    Linears that read the same tensor share one plan, so that their input is quantized once.
    """
    if calibration is None:
        return dict.fromkeys(linears, ActivationPlan())
    plans: dict[str, ActivationPlan] = {}
    for names in input_groups(calibration):
        chosen = _plan_group([linears[name] for name in names], calibration.stats[names[0]], recipe, bits)
        plans.update(dict.fromkeys(names, chosen))
    return {name: plans[name] for name in linears if name in plans}


def input_groups(calibration: Calibration) -> list[tuple[str, ...]]:
    """Names of the linears that share an input, and so their statistics object; a linear alone is a group too."""
    groups: dict[int, list[str]] = {}
    for name, stats in calibration.stats.items():
        groups.setdefault(id(stats), []).append(name)
    return [tuple(names) for names in groups.values()]


def _plan_group(group: Sequence[nn.Linear], stats: ChannelStats, recipe: Recipe, bits: WeightBits) -> ActivationPlan:
    weights = [linear.weight for linear in group]
    static = recipe.activation == "static"
    if recipe.search:
        may_shift = all(linear.bias is not None for linear in group)
        return search(stats, weights, static=static, bits=bits, may_shift=may_shift)
    return plan(stats, weights, static=static, alpha=recipe.alpha, affine=False)


def _calibrate(
    model: nn.Module,
    linears: Mapping[str, nn.Linear],
    recipe: Recipe,
    calibration: Iterable[Batch] | Calibration | None,
    progress: Callable[[int], None] | None,
) -> Calibration | None:
    if not recipe.needs_calibration:
        return None
    if isinstance(calibration, Calibration):
        return _of_these(calibration, linears)
    return collect(model, linears, _batches(recipe, calibration), progress)


def _batches(recipe: Recipe, calibration: Iterable[Batch] | Calibration | None) -> Iterable[Batch]:
    if calibration is None:
        raise CalibrationError(
            f"recipe {recipe.name!r} needs calibration data: "
            "pass a few hundred real examples as dicts of the model's inputs"
        )
    if isinstance(calibration, Calibration):
        raise CalibrationError(
            f"recipe {recipe.name!r} runs the model on calibration data; pass the batches, not their statistics"
        )
    return calibration


def _of_these(calibration: Calibration, linears: Mapping[str, nn.Linear]) -> Calibration:
    """The statistics of ``linears`` alone.

    Raises:
        CalibrationError: they were gathered on another model, or with another filter.
    """
    known = {**calibration.stats, **dict.fromkeys(calibration.never_ran)}
    lacking = [name for name in linears if name not in known]
    if lacking:
        raise CalibrationError(
            f"the calibration statistics know nothing of {lacking[0]!r}; gather them on this model, with this filter"
        )
    kept = {name: stats for name, stats in calibration.stats.items() if name in linears}
    return Calibration(kept, calibration.never_ran, calibration.batches)


def _quantize_one(
    name: str, weight: Tensor, activation: ActivationPlan, recipe: Recipe, isa: str, stats: ChannelStats | None
) -> Int8Weight:
    bits = recipe.resolve_weight_bits(isa)
    try:
        if recipe.activation == "dynamic" and not recipe.smoothing:
            act_absmax = None if stats is None else stats.absmax
            return schemes.build_weight(weight, recipe, bits, isa=isa, act_absmax=act_absmax)
        return Int8Weight.from_float(
            weight,
            bits=bits,
            smoothing_factor=activation.factor,
            act_scale=activation.scale,
            dynamic=activation.scale is None,
            act_affine=activation.affine,
            act_shift=activation.shift,
            act_zero_point=activation.zero_point,
        )
    except QuantizationError as error:
        raise QuantizationError(f"module {name!r}: {error}") from error


def _shifted_bias(linear: nn.Linear, activation: ActivationPlan) -> Tensor | None:
    """``b + W z``: what a shift z of the input takes from the product, given back (exact in real numbers)."""
    if activation.shift is None:
        return None
    shifted = linear.bias.detach().double() + linear.weight.detach().double() @ activation.shift.double()
    return shifted.to(linear.bias.dtype)


def _copy_without_weights(model: nn.Module, linears: list[nn.Linear]) -> nn.Module:
    """A deep copy of ``model`` that does not duplicate the weights about to be replaced."""
    memo: dict[int, object] = {id(linear.weight): linear.weight for linear in linears}
    return copy.deepcopy(model, memo)


class QuantizedLinear(nn.Linear):
    """An ``nn.Linear`` whose weight is an :class:`Int8Weight`; it only prints itself differently."""

    def extra_repr(self) -> str:
        weight = cast(Int8Weight, self.weight)
        return f"{self.in_features}, {self.out_features}, int8 {weight.describe()}"


def set_weight(module: nn.Linear, weight: Int8Weight, bias: Tensor | None = None) -> None:
    """Give ``module`` a quantized weight, in place, and the bias that goes with it; None keeps the one it has."""
    module.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)
    module.__class__ = QuantizedLinear


@dataclass
class SmoothQuant(AOBaseConfig):  # type: ignore[misc]
    """Our quantization as a config for torchao's ``quantize_``.

        quantize_(model, int8.SmoothQuant.prepared(model, "sq-static", calibration), filter_fn=None)

    torchao transforms one module at a time, while factors are shared by linears that read the same tensor; so the
    config carries the finished plan of the whole model, made by :meth:`prepared`.
    """

    weights: dict[int, tuple[Int8Weight, Tensor | None]] = field(default_factory=dict)

    @classmethod
    def prepared(
        cls,
        model: nn.Module,
        recipe: Recipe | str,
        calibration: Iterable[Batch] | None = None,
        *,
        accept: LinearFilter = encoder_linear,
        isa: str | None = None,
    ) -> SmoothQuant:
        """Calibrate ``model`` and plan its quantization; arguments and errors as :func:`quantize`."""
        quantized = dict(quantize(model, recipe, calibration, accept=accept, isa=isa).named_modules())
        originals = find_linears(model, accept)
        return cls(
            {
                id(linear): (quantized[name].weight, quantized[name].bias)
                for name, linear in originals.items()
                if isinstance(quantized[name].weight, Int8Weight)
            }
        )


@register_quantize_module_handler(SmoothQuant)  # type: ignore[untyped-decorator]
def _smooth_quant_handler(module: nn.Module, config: SmoothQuant) -> nn.Module:
    if id(module) in config.weights:
        set_weight(cast(nn.Linear, module), *config.weights[id(module)])
    return module


isa_module.enforce()
torch.serialization.add_safe_globals([Recipe])
