"""The one operator that a quantized linear traces to, and its reference in plain torch.

``int8::linear`` is what graphs contain: one node a linear, whatever the recipe, so that the passes of ``int8.graph``
match a name and never a shape of decomposed arithmetic. Run eagerly it computes the reference below: exact, and slow.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

#: Largest and smallest level of a symmetric signed activation. -128 is not used, as in the papers (METHODS: clip).
ACT_LEVELS = 127

#: Added to signed levels where kernels multiply unsigned by signed (no AMX); see :func:`shifted_to_unsigned`.
UNSIGNED_SHIFT = 128

#: A token whose largest magnitude is below this counts as zero: its scale and the reciprocal stay finite and normal.
MIN_ABSMAX = 1e-30

_SCHEMA = (
    "linear(Tensor x, Tensor qweight, Tensor weight_scale, Tensor? bias, Tensor? act_multiplier, Tensor? act_scale, "
    "ScalarType out_dtype) -> Tensor"
)
_library: Any = cast(Any, torch.library).Library("int8", "DEF")
_library.define(_SCHEMA)
_library.define("own(Tensor x) -> Tensor")


def max_inner_size(unsigned_activation: bool) -> int:
    """The largest K whose INT32 accumulator cannot overflow.

    Signed levels reach 127 x 127 here, and -128 is allowed for weights that others made: K * 128 * 128 < 2**31 gives
    131,071. Unsigned activations reach 255: K * 255 * 128 < 2**31 gives 65,793.
    """
    return 65_793 if unsigned_activation else 131_071


def quantize_activation(x: Tensor, multiplier: Tensor | None, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Symmetric INT8 levels of an activation and their scale.

    Args:
        x: (..., K), any float dtype; computed in FP32.
        multiplier: (K,), the reciprocal of the smoothing factor, or None.
        scale: (), the calibrated scale (static); None computes one a token (dynamic).

    Returns:
        Levels (..., K) as int8 in [-127, 127], and the scale: () if static, else (..., 1), FP32 and positive also for
        an all-zero token.
    """
    value = x.float()
    if scale is not None:
        inverse = scale.reciprocal() if multiplier is None else multiplier / scale
        return _levels(value * inverse), scale
    if multiplier is not None:
        value = value * multiplier
    absmax = value.abs().amax(dim=-1, keepdim=True).clamp(min=MIN_ABSMAX)
    return _levels(value * (ACT_LEVELS / absmax)), absmax / ACT_LEVELS


def _levels(value: Tensor) -> Tensor:
    """Nearest level, ties to even, clipped to the symmetric range."""
    return torch.round(value).clamp(-ACT_LEVELS, ACT_LEVELS).to(torch.int8)


def shifted_to_unsigned(levels: Tensor) -> Tensor:
    """u8 levels = s8 levels + 128. The product gains 128 * sum_k W[n, k], which kernels subtract again."""
    return (levels.to(torch.int16) + UNSIGNED_SHIFT).to(torch.uint8)


def integer_product(levels: Tensor, qweight: Tensor) -> Tensor:
    """Exact ``levels @ qweight.T`` as FP64: every INT32 accumulator is below 2**53, so no rounding happens.

    (FP32 would round above 2**24, and ``torch._int_mm`` saturates on CPUs without VNNI.)
    """
    return torch.matmul(levels.double(), qweight.double().t())


def linear_reference(
    x: Tensor,
    qweight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    act_multiplier: Tensor | None,
    act_scale: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """``y = (Xq Wq^T) * x_scale * w_scale + b`` (SmoothQuant, section 4; arXiv 2211.10438).

    Args:
        x: (..., K) activations.
        qweight: (N, K) int8 levels.
        weight_scale: (N,) FP32, one scale an output row.
        bias: (N,) or None.
        act_multiplier: (K,) FP32, reciprocal of the smoothing factor, or None.
        act_scale: () FP32 for a static recipe, None for one scale a token.
        out_dtype: dtype of the result; scaling happens in FP32 and is cast last.

    Returns:
        (..., N) of ``out_dtype``.
    """
    levels, scale = quantize_activation(x, act_multiplier, act_scale)
    result = integer_product(levels, qweight).float() * scale * weight_scale
    if bias is not None:
        result = result + bias.float()
    return result.to(out_dtype)


_library.impl("linear", linear_reference, "CompositeExplicitAutograd")


def _linear_fake(
    x: Tensor,
    qweight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    act_multiplier: Tensor | None,
    act_scale: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], qweight.shape[0]), dtype=out_dtype)


torch.library.register_fake("int8::linear", _linear_fake, lib=_library)


def _own(x: Tensor) -> Tensor:
    """A copy of ``x`` that the graph owns, so that a fused kernel may accumulate into it."""
    return x.clone()


_library.impl("own", _own, "CompositeExplicitAutograd")
torch.library.register_fake("int8::own", _own, lib=_library)
