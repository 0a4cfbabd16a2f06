"""``zeropoint``: both operands affine, one scale and zero point each (LLM.int8(), arXiv 2208.07339, section 2.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from int8.tensor import Int8Weight, WeightBits


def quantize(x: Tensor, levels: int = 127) -> tuple[Tensor, Tensor, Tensor]:
    """``nd = 2 * levels / (max - min)``, ``zp = round(nd * min) + levels``, ``X_i8 = round(nd * X) - zp``.

    The smallest value becomes -levels and the largest levels: all of the range is used, however one-sided X is.

    Args:
        x: any shape, float, not constant.
        levels: the largest level, 127 in the paper.

    Returns:
        FP32 whole numbers of x's shape, nd () and zp (), with X ~ (X_i8 + zp) / nd.
    """
    value = x.float()
    dynamic_range = 2 * levels / (value.amax() - value.amin())
    zero_point = torch.round(dynamic_range * value.amin()) + levels
    return torch.round(dynamic_range * value) - zero_point, dynamic_range, zero_point


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, weight_levels: int = 127) -> Tensor:
    """``X W^T + b`` through INT8: ``(X_i8 + zp_x) (W_i8 + zp_w)^T / (nd_x * nd_w) + b``, unrolled as the paper does.

    Args:
        x: (..., K) float.
        weight: (N, K) float.
        bias: (N,) or None.
        weight_levels: the weight's largest level; 63 where kernels have no VNNI.

    Returns:
        (..., N) FP64.
    """
    x_levels, x_range, x_zero = (part.double() for part in quantize(x))
    w_levels, w_range, w_zero = (part.double() for part in quantize(weight, weight_levels))
    accumulator = x_levels @ w_levels.t()
    accumulator = accumulator + w_zero * x_levels.sum(dim=-1, keepdim=True) + x_zero * w_levels.sum(dim=1)
    accumulator = accumulator + weight.shape[1] * x_zero * w_zero
    result = accumulator / (x_range * w_range)
    return result if bias is None else result + bias


def build_weight(weight: Tensor, bits: WeightBits) -> Int8Weight:
    """The quantized weight of this scheme from ``weight`` (N, K)."""
    return Int8Weight.from_float_affine(weight, bits=bits)
