"""``rowwise``: one symmetric scale a row of X (a token) and one for all of W (LLM.int8(), arXiv 2208.07339, section 3).

The paper takes row-wise quantization as the common way of more than one scale; vector-wise improves on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from int8.schemes import absmax
from int8.tensor import Int8Weight, WeightBits


def quantize_rows(x: Tensor, levels: int = 127) -> tuple[Tensor, Tensor]:
    """``round(levels * X_i / max|X_i|)`` for each row i.

    Args:
        x: (..., K) float, no row all zero.
        levels: the largest level, 127 in the paper.

    Returns:
        FP32 whole numbers (..., K), and c_x = levels / max|X_i| (..., 1).
    """
    scale = levels / x.float().abs().amax(dim=-1, keepdim=True)
    return torch.round(x.float() * scale), scale


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, weight_levels: int = 127) -> Tensor:
    """``X W^T + b`` through INT8: ``X_i8 W_i8^T / (c_x * s_w) + b``.

    Args:
        x: (..., K) float.
        weight: (N, K) float.
        bias: (N,) or None.
        weight_levels: the weight's largest level; 63 where kernels have no VNNI.

    Returns:
        (..., N) FP64.
    """
    x_levels, x_scale = quantize_rows(x)
    w_levels, w_scale = absmax.quantize(weight, weight_levels)
    result = x_levels.double() @ w_levels.double().t() / (x_scale.double() * w_scale.double())
    return result if bias is None else result + bias


def build_weight(weight: Tensor, bits: WeightBits) -> Int8Weight:
    """The quantized weight of this scheme from ``weight`` (N, K)."""
    return Int8Weight.from_float(weight, bits=bits, dynamic=True, per_tensor=True)
