"""``absmax``: one symmetric scale for all of X and one for all of W (LLM.int8(), arXiv 2208.07339, section 2.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from int8.tensor import Int8Weight, WeightBits


def quantize(x: Tensor, levels: int = 127) -> tuple[Tensor, Tensor]:
    """``X_i8 = round(levels * X / max|X|)``.

    Args:
        x: any shape, float, not all zero.
        levels: the largest level, 127 in the paper.

    Returns:
        FP32 whole numbers of x's shape, and s_x = levels / max|X|, ().
    """
    scale = levels / x.float().abs().amax()
    return torch.round(x.float() * scale), scale


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, weight_levels: int = 127) -> Tensor:
    """``X W^T + b`` through INT8: ``X_i8 W_i8^T / (s_x * s_w) + b``.

    Args:
        x: (..., K) float.
        weight: (N, K) float.
        bias: (N,) or None.
        weight_levels: the weight's largest level; 63 where kernels have no VNNI.

    Returns:
        (..., N) FP64.
    """
    x_levels, x_scale = quantize(x)
    w_levels, w_scale = quantize(weight, weight_levels)
    result = x_levels.double() @ w_levels.double().t() / (x_scale.double() * w_scale.double())
    return result if bias is None else result + bias


def build_weight(weight: Tensor, bits: WeightBits) -> Int8Weight:
    """The quantized weight of this scheme from ``weight`` (N, K)."""
    return Int8Weight.from_float(weight, bits=bits, dynamic=True, act_per_tensor=True, per_tensor=True)
