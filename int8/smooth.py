"""Smoothing factors: moving outliers from activations to weights (SmoothQuant, arXiv 2211.10438, section 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
