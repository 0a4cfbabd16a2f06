"""``vectorwise``: one symmetric scale a token and one an output row (LLM.int8(), arXiv 2208.07339, section 3.1).

Recipe ``dynamic`` is the same thing under the name that deployments use: both divide by 127, both round ties to even,
and :func:`build_weight` is the one place that builds the weight of either.
"""

from __future__ import annotations

from torch import Tensor

from int8.schemes import rowwise
from int8.tensor import Int8Weight, WeightBits


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, weight_levels: int = 127) -> Tensor:
    """``X W^T + b`` through INT8: ``X_i8 W_i8^T / (c_x outer c_w) + b``; the paper's columns are our output rows.

    Args:
        x: (..., K) float.
        weight: (N, K) float.
        bias: (N,) or None.
        weight_levels: the weight's largest level; 63 where kernels have no VNNI.

    Returns:
        (..., N) FP64.
    """
    x_levels, x_scale = rowwise.quantize_rows(x)
    w_levels, w_scale = rowwise.quantize_rows(weight, weight_levels)
    result = x_levels.double() @ w_levels.double().t() / (x_scale.double() * w_scale.double().reshape(-1))
    return result if bias is None else result + bias


def build_weight(weight: Tensor, bits: WeightBits) -> Int8Weight:
    """The quantized weight of this scheme from ``weight`` (N, K)."""
    return Int8Weight.from_float(weight, bits=bits, dynamic=True)
