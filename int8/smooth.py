"""Smoothing: moving outliers from activations to weights (SmoothQuant, arXiv 2211.10438, section 4), and choosing how.

The factor's strength, a shift of the channels and a zero point are chosen for each input by the error of the linears
that read it, on a sample of calibration tokens. All three are exact in real numbers and none is a pass of its own at
run time: factor and shift are part of the quantization, the shift's effect on the product goes into the bias.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from int8 import ops
from int8.calibrate import ChannelStats
from int8.tensor import WeightBits, quantize_weight

#: A factor leaves [1/BOUND, BOUND] only for a channel that is all but dead; bounded, its weights keep their scale.
FACTOR_BOUND = 1e4


def smoothing_factor(act_absmax: Tensor, weight_absmax: Tensor, alpha: float) -> Tensor:
    """s_j = max|X_j|^alpha / max|W_j|^(1-alpha), one factor an input channel (equation 4).

    Args:
        act_absmax: (K,) largest magnitude of each input channel over the calibration tokens.
        weight_absmax: (K,) largest magnitude of each weight column; of all weights that share the input.
        alpha: migration strength, 0 to 1.

    Returns:
        (K,) FP32 factors, finite and positive. A channel that is dead on either side gets 1: there is nothing to
        balance.
    """
    act, weight = act_absmax.double(), weight_absmax.double()
    alive = (act > 0) & (weight > 0)
    one = torch.ones_like(act)
    factor = torch.where(alive, act, one).pow(alpha) / torch.where(alive, weight, one).pow(1.0 - alpha)
    return torch.where(alive, factor, one).clamp(1.0 / FACTOR_BOUND, FACTOR_BOUND).float()


def column_absmax(weights: Sequence[Tensor]) -> Tensor:
    """(K,) largest magnitude of each input column over ``weights``, each (N_i, K)."""
    return torch.stack([weight.detach().float().abs().amax(dim=0) for weight in weights]).amax(dim=0)


#: Strengths that the search tries, from the paper's default to all but everything.
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)


@dataclass(frozen=True)
class ActivationPlan:
    """How the input of one linear (or of several that read the same tensor) is quantized.

    Attributes:
        factor: (K,) smoothing factor, or None.
        scale: () calibrated scale; None where it is computed a token.
        affine: True if levels have a zero point.
        zero_point: () calibrated, whole number in [-128, 127]; None unless static and affine.
        shift: (K,) subtracted first, or None; only where affine.
        alpha: strength of the factor, for reports.
        error: what the search measured: mean squared error of an output token, summed over output channels.
    """

    factor: Tensor | None = None
    scale: Tensor | None = None
    affine: bool = False
    zero_point: Tensor | None = None
    shift: Tensor | None = None
    alpha: float | None = None
    error: float | None = None


def plan(
    stats: ChannelStats,
    weights: Sequence[Tensor],
    *,
    static: bool,
    alpha: float | None,
    affine: bool,
    shift: Tensor | None = None,
) -> ActivationPlan:
    """The plan that these choices give, its scale and zero point from the extremes of the channels.

    Args:
        stats: of the input.
        weights: (N_i, K) of all linears that read it.
        static: one calibrated scale, or one a token at run time.
        alpha: strength of the smoothing factor; None for no factor.
        affine: give the levels a zero point.
        shift: (K,) subtracted first; needs ``affine``.
    """
    low, high = (stats.low, stats.high) if shift is None else (stats.low - shift, stats.high - shift)
    factor = None
    if alpha is not None:
        factor = smoothing_factor(torch.maximum(low.abs(), high.abs()), column_absmax(weights), alpha)
        low, high = low / factor, high / factor
    if not static:
        return ActivationPlan(factor, affine=affine, shift=shift, alpha=alpha)
    if not affine:
        scale = torch.maximum(low.abs(), high.abs()).amax().clamp(min=ops.MIN_ABSMAX) / ops.ACT_LEVELS
        return ActivationPlan(factor, scale, alpha=alpha)
    bottom, top = low.amin().clamp(max=0.0), high.amax().clamp(min=0.0)
    scale = (top - bottom).clamp(min=ops.MIN_ABSMAX) / ops.AFFINE_STEPS
    zero_point = torch.round(-bottom / scale) - ops.UNSIGNED_SHIFT
    return ActivationPlan(factor, scale, True, zero_point, shift, alpha)


def one_sided_shift(stats: ChannelStats) -> Tensor | None:
    """(K,) the mean of each channel that lies on one side of zero, 0 for the others; None if there is no such channel.

    One-sided is a channel whose largest magnitude at least halves when its mean is subtracted: the outliers of
    LLM.int8()'s appendix C. Shifting every channel by its mean lowers the error of each linear by itself, and yet cost
    1 to 2 dB of the embedding of a model that has no such channel.
    """
    mean = stats.sample.mean(dim=0)
    remaining = torch.maximum(stats.high - mean, mean - stats.low)
    one_sided = remaining < 0.5 * stats.absmax
    return torch.where(one_sided, mean, 0.0) if bool(one_sided.any()) else None


def search(
    stats: ChannelStats, weights: Sequence[Tensor], *, static: bool, bits: WeightBits, may_shift: bool
) -> ActivationPlan:
    """The plan with the smallest error of the linears that read an input, measured on the sample of its tokens.

    Tries each strength with symmetric and with affine levels; one-sided channels are shifted first.

    Args:
        stats, weights, static: as :func:`plan`.
        bits: of the weights.
        may_shift: False where a linear has no bias that could take the shift's effect.
    """
    shift = one_sided_shift(stats) if may_shift else None
    judge = _Judge(stats.sample, weights, bits)
    kinds = (True,) if shift is not None else (False, True)
    tried = (
        judge.measured(plan(stats, weights, static=static, alpha=alpha, affine=affine, shift=shift))
        for alpha in ALPHAS
        for affine in kinds
    )
    return best(tried)


#: Errors this close are a tie. The last bits of a sum depend on where in memory its operands lie, so without it two
#: processes of one commit could settle a tie differently and quantize one model in two ways.
TIE = 1e-3


def best(candidates: Iterable[ActivationPlan]) -> ActivationPlan:
    """The candidate with the smallest error; of those that tie with one before them, the one before.

    Raises:
        ValueError: there is none.
    """
    chosen: ActivationPlan | None = None
    for candidate in candidates:
        if chosen is None or _error(candidate) < (1.0 - TIE) * _error(chosen):
            chosen = candidate
    if chosen is None:
        raise ValueError("there is no plan to choose from")
    return chosen


def _error(candidate: ActivationPlan) -> float:
    return candidate.error if candidate.error is not None else float("inf")


class _Judge:
    """Measures plans by the outputs of some linears on some tokens.

    Errors are absolute. Dividing each output channel's by its variance cost 1.3 dB on MiniLM (28.7 to 27.4, dynamic)
    and gained nothing where a factor had been moved from value rows into the next linear.
    """

    def __init__(self, sample: Tensor, weights: Sequence[Tensor], bits: WeightBits) -> None:
        self._sample = sample
        self._weight = torch.cat([weight.detach().float() for weight in weights])
        self._bits = bits

    def measured(self, candidate: ActivationPlan) -> ActivationPlan:
        """``candidate`` with its error."""
        weight = self._weight if candidate.factor is None else self._weight * candidate.factor
        levels, weight_scale = quantize_weight(weight, self._bits)
        exact = self._sample if candidate.shift is None else self._sample - candidate.shift
        exact = exact if candidate.factor is None else exact / candidate.factor
        lost = exact @ weight.t() - dequantized(self._sample, candidate) @ (levels.float() * weight_scale[:, None]).t()
        error = float(lost.square().mean(dim=0).sum())
        return dataclasses.replace(candidate, error=error)


def dequantized(x: Tensor, chosen: ActivationPlan) -> Tensor:
    """What is left of ``x`` (T, K) after quantization: shifted, smoothed, (level - zero point) * scale."""
    multiplier = None if chosen.factor is None else chosen.factor.reciprocal()
    if not chosen.affine:
        levels, scale = ops.quantize_activation(x, multiplier, chosen.scale)
        return levels.float() * scale
    levels, scale, zero = ops.quantize_affine_activation(x, multiplier, chosen.shift, chosen.scale, chosen.zero_point)
    return (levels.float() - zero) * scale
