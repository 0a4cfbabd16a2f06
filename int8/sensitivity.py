"""What quantizing each part of a model costs at its output.

Linears that read the same tensor form a group: they share a plan, and are quantized or left alone together. A group is
rated by the signal-to-noise ratio of the model's output when it alone is quantized, and when everything but it is. The
arithmetic is that of the eager operators, exact and independent of the ISA but for the weights' bits.

What counts as output: of hidden states the mean over a text's real tokens, as sentence encoders pool them; of logits
(a last dimension of at most ``MOST_CLASSES``, or two dimensions) the values at real positions.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from int8.calibrate import Batch, Calibration
from int8.errors import CalibrationError
from int8.quantization import WeightAndBias, input_groups, set_weight

#: Called with the number of model passes done and to be done.
OnPass = Callable[[int, int], None]
Group = tuple[str, ...]

#: Three-dimensional outputs whose last dimension is at most this are logits of each token, not hidden states.
MOST_CLASSES = 8


@dataclass(frozen=True)
class GroupSensitivity:
    """One group of linears.

    Attributes:
        linears: qualified names.
        alone_db: SQNR of the model's output when only this group is quantized, in dB; infinite without any error.
        without_db: the same when every group but this one is.
        noise_share: part of the noise that all groups make one by one, 0 to 1.
    """

    linears: Group
    alone_db: float
    without_db: float
    noise_share: float


@dataclass(frozen=True)
class Sensitivity:
    """All groups of a model under one recipe, in the model's order; ``total_db`` is the SQNR with all quantized."""

    recipe: str
    groups: tuple[GroupSensitivity, ...]
    total_db: float
    sequences: int


def measure(
    model: nn.Module,
    recipe: str,
    weights: Mapping[str, WeightAndBias],
    seen: Calibration,
    batches: Sequence[Batch],
    progress: OnPass | None = None,
) -> Sensitivity:
    """Rate each group of ``model`` under a recipe.

    Args:
        model: floating-point, in eval mode. It is not changed.
        recipe: its name, for the report.
        weights: of all linears that the recipe quantizes; see :func:`int8.quantization.quantized_weights`.
        seen: statistics that tell which linears share an input.
        batches: dicts of the model's inputs, on which outputs are compared.

    Raises:
        CalibrationError: no batch, or outputs that are no numbers.
    """
    trial = Trial(model, batches)
    groups = [group for group in input_groups(seen) if all(name in weights for name in group)]
    total = 2 * len(groups) + 1
    alone, without = list[float](), list[float]()
    for group in groups:
        alone.append(trial.noise({name: weights[name] for name in group}))
        without.append(trial.noise({name: pair for name, pair in weights.items() if name not in group}))
        if progress is not None:
            progress(2 * len(alone), total)
    everything = trial.noise(weights)
    if progress is not None:
        progress(total, total)
    whole = sum(alone) or 1.0
    rated = (
        GroupSensitivity(group, trial.sqnr_db(one), trial.sqnr_db(rest), one / whole)
        for group, one, rest in zip(groups, alone, without, strict=True)
    )
    return Sensitivity(recipe, tuple(rated), trial.sqnr_db(everything), trial.sequences)


class Trial:
    """A model beside its own floating-point outputs on some batches, to try quantized weights in.

    Attributes:
        signal: sum of squares of the floating-point outputs.
        sequences: how many texts are compared.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Batch]) -> None:
        """Run ``model`` on ``batches`` once. It is copied without its tensors, and not changed.

        Raises:
            CalibrationError: no batch, or outputs that are no numbers.
        """
        if not batches:
            raise CalibrationError("no batch to compare outputs on; pass more calibration data")
        tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self._model = copy.deepcopy(model, dict(tensors))
        self._modules = dict(self._model.named_modules())
        self._batches = batches
        self._reference = list(self._outputs())
        self.signal = sum(float(one.square().sum()) for one in self._reference)
        self.sequences = sum(int(next(iter(batch.values())).shape[0]) for batch in batches)
        if not math.isfinite(self.signal):
            raise CalibrationError("the floating-point outputs hold NaN or infinity; check the model and its inputs")

    def noise(self, weights: Mapping[str, WeightAndBias]) -> float:
        """Sum of squares of what the outputs lose with ``weights``; infinite where they are no numbers any more."""
        with self._holding(weights):
            lost = sum(
                float((one - exact).square().sum()) for one, exact in zip(self._outputs(), self._reference, strict=True)
            )
        return lost if math.isfinite(lost) else math.inf

    def sqnr_db(self, noise: float) -> float:
        """``noise`` as a signal-to-quantization-noise ratio."""
        return sqnr_db(self.signal, noise)

    def _outputs(self) -> Iterator[Tensor]:
        with torch.no_grad():
            for batch in self._batches:
                yield compared_output(self._model(**batch), batch).double()

    @contextmanager
    def _holding(self, weights: Mapping[str, WeightAndBias]) -> Iterator[None]:
        """Give the linears these weights, and their own back."""
        linears = {name: cast(nn.Linear, self._modules[name]) for name in weights}
        before = {name: (linear.weight, linear.bias, linear.__class__) for name, linear in linears.items()}
        try:
            for name, (weight, bias) in weights.items():
                set_weight(linears[name], weight, bias)
            yield
        finally:
            for name, (own_weight, own_bias, kind) in before.items():
                linears[name].weight, linears[name].bias, linears[name].__class__ = own_weight, own_bias, kind


def sqnr_db(signal: float, noise: float) -> float:
    """10 log10 of signal over noise: infinite without noise, minus infinity without signal or with endless noise."""
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal > 0.0 and math.isfinite(noise) else -math.inf


def compared_output(output: Any, batch: Batch) -> Tensor:
    """(B, D) or (T, C): what of a model's ``output`` for ``batch`` is compared; see the module.

    Args:
        output: a tensor, or a transformers output, of which hidden states or logits are taken.
        batch: its ``attention_mask`` (B, S), where present, marks real tokens.

    Raises:
        CalibrationError: an output of another kind.
    """
    value = _tensor_of(output)
    if value.ndim != 3:
        return value.reshape(value.shape[0], -1).float()
    mask = batch.get("attention_mask")
    real = torch.ones(value.shape[:2]) if mask is None or mask.shape != value.shape[:2] else mask.float()
    if value.shape[-1] <= MOST_CLASSES:
        return value.float()[real.bool()]
    weighted: Tensor = value.float() * real[..., None]
    return weighted.sum(dim=1) / real.sum(dim=1, keepdim=True).clamp(min=1.0)


def _tensor_of(output: Any) -> Tensor:
    for name in ("logits", "start_logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), Tensor):
            output = getattr(output, name)
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    if not isinstance(output, Tensor) or output.ndim < 2:
        raise CalibrationError(
            f"the model returns a {type(output).__name__}; outputs are compared where it returns a tensor, logits or "
            "last_hidden_state: wrap it"
        )
    return output


def group_name(linears: Group) -> str:
    """A group's name for tables: ``encoder.layer.0.attention.self.(query key value)``, or the linear's own."""
    if len(linears) == 1:
        return linears[0]
    parts = zip(*(name.split(".") for name in linears), strict=False)
    common = itertools.takewhile(lambda same: len(set(same)) == 1, parts)
    prefix = "".join(f"{same[0]}." for same in common)
    return f"{prefix}({' '.join(name.removeprefix(prefix) for name in linears)})"
