"""The operators that quantized linears trace to, and their references in plain torch.

Graphs contain one node a linear, so that the passes of ``int8.graph`` match a name and never a shape of decomposed
arithmetic: ``int8::linear`` where both operands are symmetric, ``int8::linear_zeropoint`` where both are affine, and
``int8::linear_decomposed`` where outlier feature dimensions stay in floating point. Run eagerly they compute the
references below: exact, and slow.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

#: Largest and smallest level of a symmetric signed activation. -128 is not used, as in the papers (METHODS: clip).
ACT_LEVELS = 127

#: Added to signed levels where kernels multiply unsigned by signed (no AMX); see :func:`shifted_to_unsigned`.
UNSIGNED_SHIFT = 128

#: Steps between the smallest and the largest affine level of an activation, -128 and 127.
AFFINE_STEPS = 255

#: Bound on the magnitude of a zero point: the paper's 16-bit integer, and FP32 still resolves the levels around it.
MAX_ZERO_POINT = 2**15 - 1

#: A token whose largest magnitude is below this counts as zero: its scale and the reciprocal stay finite and normal.
MIN_ABSMAX = 1e-30

_SCHEMA = (
    "linear(Tensor x, Tensor qweight, Tensor weight_scale, Tensor? bias, Tensor? act_multiplier, Tensor? act_scale, "
    "ScalarType out_dtype, bool act_per_tensor=False, Tensor? act_shift=None, Tensor? act_zero_point=None, "
    "bool act_affine=False, str layout='rows', int weight_bits=8) -> Tensor"
)
_ZEROPOINT_SCHEMA = (
    "linear_zeropoint(Tensor x, Tensor qweight, Tensor weight_scale, Tensor weight_zero_point, Tensor? bias, "
    "ScalarType out_dtype) -> Tensor"
)
_DECOMPOSED_SCHEMA = (
    "linear_decomposed(Tensor x, Tensor qweight, Tensor weight_scale, Tensor? bias, Tensor? outlier_weight, "
    "Tensor? outlier_index, float outlier_threshold, ScalarType outlier_dtype, ScalarType out_dtype) -> Tensor"
)
_OUTLIER_PRODUCT_SCHEMA = (
    "outlier_product(Tensor x, Tensor is_outlier, Tensor? outlier_weight, Tensor qweight, Tensor weight_scale, "
    "ScalarType outlier_dtype) -> Tensor"
)
_library: Any = cast(Any, torch.library).Library("int8", "DEF")
for _schema in (_SCHEMA, _ZEROPOINT_SCHEMA, _DECOMPOSED_SCHEMA, _OUTLIER_PRODUCT_SCHEMA):
    _library.define(_schema)
_library.define("own(Tensor x) -> Tensor")


def max_inner_size(unsigned_activation: bool) -> int:
    """The largest K whose INT32 accumulator cannot overflow.

    Signed levels reach 127 x 127 here, and -128 is allowed for weights that others made: K * 128 * 128 < 2**31 gives
    131,071. Unsigned activations reach 255: K * 255 * 128 < 2**31 gives 65,793.
    """
    return 65_793 if unsigned_activation else 131_071


def quantize_activation(
    x: Tensor, multiplier: Tensor | None, scale: Tensor | None, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Symmetric INT8 levels of an activation and their scale.

    Args:
        x: (..., K), any float dtype; computed in FP32.
        multiplier: (K,), the reciprocal of the smoothing factor, or None.
        scale: (), the calibrated scale (static); None computes it at run time (dynamic).
        per_tensor: compute one scale for all of ``x`` instead of one a token.

    Returns:
        Levels (..., K) as int8 in [-127, 127], and the scale: () if one covers the tensor, else (..., 1), FP32 and
        positive also where all values are zero.
    """
    value = x.float()
    if scale is not None:
        inverse = scale.reciprocal() if multiplier is None else multiplier / scale
        return _levels(value * inverse), scale
    if multiplier is not None:
        value = value * multiplier
    magnitude = value.abs()
    absmax = (magnitude.amax() if per_tensor else magnitude.amax(dim=-1, keepdim=True)).clamp(min=MIN_ABSMAX)
    return _levels(value * (ACT_LEVELS / absmax)), absmax / ACT_LEVELS


def quantize_affine_activation(
    x: Tensor, multiplier: Tensor | None, shift: Tensor | None, scale: Tensor | None, zero_point: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Affine INT8 levels of an activation: ``(x - shift) * multiplier ~ (level - zero_point) * scale``.

    Twice as fine as symmetric levels where values lie on one side of zero, as a GELU's do.

    Args:
        x: (..., K), any float dtype; computed in FP32.
        multiplier: (K,), the reciprocal of the smoothing factor, or None.
        shift: (K,), subtracted first; its effect on the product belongs into the bias (Outlier Suppression+,
            arXiv 2304.09145, section 4.1). None for none.
        scale, zero_point: (), as calibrated (static), whole number in [-128, 127]; both None computes one pair a token
            so that its range, widened to hold zero, becomes [-128, 127].

    Returns:
        Levels (..., K) as int8, scale and zero point as FP32: () if static, else (..., 1).
    """
    value = x.float() if shift is None else x.float() - shift
    if scale is not None and zero_point is not None:
        inverse = scale.reciprocal() if multiplier is None else multiplier / scale
        zero_point = zero_point.float()
        return _affine_levels(value * inverse, zero_point), scale, zero_point
    if multiplier is not None:
        value = value * multiplier
    low = value.amin(dim=-1, keepdim=True).clamp(max=0.0)
    spread = (value.amax(dim=-1, keepdim=True).clamp(min=0.0) - low).clamp(min=MIN_ABSMAX)
    inverse = AFFINE_STEPS / spread
    zero_point = torch.round(-low * inverse) - UNSIGNED_SHIFT
    return _affine_levels(value * inverse, zero_point), spread / AFFINE_STEPS, zero_point


def _affine_levels(value: Tensor, zero_point: Tensor) -> Tensor:
    """Nearest level of the full range around ``zero_point``, ties to even."""
    return (torch.round(value) + zero_point).clamp(-UNSIGNED_SHIFT, AFFINE_STEPS - UNSIGNED_SHIFT).to(torch.int8)


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
    act_per_tensor: bool = False,
    act_shift: Tensor | None = None,
    act_zero_point: Tensor | None = None,
    act_affine: bool = False,
    layout: str = "rows",
    weight_bits: int = 8,
) -> Tensor:
    """``y = (Xq Wq^T) * x_scale * w_scale + b`` (SmoothQuant, section 4; arXiv 2211.10438).

    With affine activations ``y = (Xq Wq^T - zx * sum_k Wq) * x_scale * w_scale + b``, the bracket exact.

    Args:
        x: (..., K) activations.
        qweight: (N, K) int8 levels; or, packed for kernels of ours, in another ``layout``.
        weight_scale: (N,) FP32, one scale an output row.
        bias: (N,) or None.
        act_multiplier: (K,) FP32, reciprocal of the smoothing factor, or None.
        act_scale: () FP32 for a static recipe, None for one that is computed here.
        act_per_tensor: compute one scale for all of ``x`` instead of one a token.
        act_shift, act_zero_point: (K,) and (), see :func:`quantize_affine_activation`; for affine activations.
        act_affine: activations have zero points, calibrated ones or one a token.
        layout: how ``qweight`` lies in memory: ``rows``, or a layout of :mod:`int8.kernels.layout`.
        weight_bits: 8, or 7 where levels keep to -63..63; kernels are chosen by it.
        out_dtype: dtype of the result; scaling happens in FP32 and is cast last.

    Returns:
        (..., N) of ``out_dtype``.
    """
    if layout != "rows":
        qweight = torch.ops.int8.unpack(qweight, weight_scale.shape[0], x.shape[-1], layout)
    if act_affine:
        levels, scale, zero = quantize_affine_activation(x, act_multiplier, act_shift, act_scale, act_zero_point)
        product = integer_product(levels, qweight) - zero.double() * qweight.double().sum(dim=1)
    else:
        levels, scale = quantize_activation(x, act_multiplier, act_scale, act_per_tensor)
        product = integer_product(levels, qweight)
    result = product.float() * scale * weight_scale
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
    act_per_tensor: bool = False,
    act_shift: Tensor | None = None,
    act_zero_point: Tensor | None = None,
    act_affine: bool = False,
    layout: str = "rows",
    weight_bits: int = 8,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight_scale.shape[0]), dtype=out_dtype)


torch.library.register_fake("int8::linear", _linear_fake, lib=_library)


def quantize_affine(x: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Affine levels of a whole tensor: its minimum becomes ``-levels``, its maximum ``levels`` (LLM.int8(), 2.1).

    The paper's normalized dynamic range is nd = 2 * levels / (max - min); its zero point, added to a level before it is
    multiplied, is round(nd * min) + levels. This is its negative, as torchao has it: x ~ (level - zero_point) * scale
    with scale = 1 / nd. Where the values lie so close together far from zero that the zero point would leave 16 bit
    (a constant tensor does), nd is as large as 16 bit allow.

    Args:
        x: any shape but empty, any float dtype; computed in FP32.
        levels: the largest level, 127 or 63.

    Returns:
        Levels as int8 of x's shape, scale () FP32, zero point () int32.
    """
    value = x.float()
    low, high = torch.aminmax(value)
    spread = (high - low).clamp(MIN_ABSMAX, torch.finfo(torch.float32).max)
    furthest = torch.maximum(-low, high).clamp(min=MIN_ABSMAX)
    dynamic_range = torch.minimum(2.0 * levels / spread, (MAX_ZERO_POINT - levels) / furthest)
    zero_point = -(torch.round(dynamic_range * low) + levels)
    quantized = (torch.round(value * dynamic_range) + zero_point).clamp(-levels, levels)
    return quantized.to(torch.int8), dynamic_range.reciprocal(), zero_point.to(torch.int32)


def linear_zeropoint_reference(
    x: Tensor,
    qweight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Both operands affine, with the products of zero points unrolled (LLM.int8(), section 2.1).

    ``y = (Xq Wq^T - zx * sum_k Wq - zw * sum_k Xq + K * zx * zw) * x_scale * w_scale + b``, the bracket exact.

    Args:
        x: (..., K) activations.
        qweight: (N, K) int8 levels.
        weight_scale, weight_zero_point: (), FP32 and int32.
        bias: (N,) or None.
        out_dtype: dtype of the result.

    Returns:
        (..., N) of ``out_dtype``.
    """
    levels, scale, zero_point = quantize_affine(x, ACT_LEVELS)
    act_zero, weight_zero = zero_point.double(), weight_zero_point.double()
    product = integer_product(levels, qweight)
    product = product - act_zero * qweight.double().sum(dim=1)
    product = product - weight_zero * levels.double().sum(dim=-1, keepdim=True)
    product = product + qweight.shape[1] * act_zero * weight_zero
    result = product.float() * (scale * weight_scale)
    if bias is not None:
        result = result + bias.float()
    return result.to(out_dtype)


def _linear_zeropoint_fake(
    x: Tensor,
    qweight: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], qweight.shape[0]), dtype=out_dtype)


def outlier_dimensions(x: Tensor, threshold: float) -> Tensor:
    """(K,) bool: feature dimensions of ``x`` (..., K) with any magnitude at or above ``threshold``."""
    return x.float().abs().reshape(-1, x.shape[-1]).amax(dim=0) >= threshold


def outlier_product_reference(
    x: Tensor,
    is_outlier: Tensor,
    outlier_weight: Tensor | None,
    qweight: Tensor,
    weight_scale: Tensor,
    outlier_dtype: torch.dtype,
) -> Tensor:
    """``X_O W_O^T`` in floating point over the outlier dimensions O; zeros where there is none.

    Args:
        x: (..., K) activations.
        is_outlier: (K,) bool.
        outlier_weight: (N, K) weights, or None to dequantize columns of ``qweight``.
        qweight, weight_scale: (N, K) int8 and (N,) FP32.
        outlier_dtype: FP32 or BF16, of the factors and of the result.

    Returns:
        (..., N) of ``outlier_dtype``.
    """
    rows = qweight.shape[0]
    index = is_outlier.reshape(-1).nonzero().reshape(-1)
    if not index.numel():
        return x.new_zeros((*x.shape[:-1], rows), dtype=outlier_dtype)
    if outlier_weight is None:
        columns = qweight.index_select(1, index) * weight_scale[:, None]
    else:
        columns = outlier_weight.index_select(1, index)
    factors = x.reshape(-1, x.shape[-1]).index_select(1, index).to(outlier_dtype)
    return torch.mm(factors, columns.to(outlier_dtype).t()).reshape(*x.shape[:-1], rows)


def _outlier_product_fake(
    x: Tensor,
    is_outlier: Tensor,
    outlier_weight: Tensor | None,
    qweight: Tensor,
    weight_scale: Tensor,
    outlier_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], qweight.shape[0]), dtype=outlier_dtype)


def linear_decomposed_reference(
    x: Tensor,
    qweight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    outlier_weight: Tensor | None,
    outlier_index: Tensor | None,
    outlier_threshold: float,
    outlier_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:
    """Mixed-precision decomposition: outlier dimensions in floating point, the rest vector-wise (LLM.int8(), 3.2).

    Args:
        x: (..., K) activations; a dimension is an outlier if any token of ``x`` reaches the threshold in it.
        qweight, weight_scale: (N, K) int8 and (N,) FP32.
        bias: (N,) or None.
        outlier_weight: (N, K) weights; with ``outlier_index`` (N, its length), the columns it names; None takes the
            columns from ``qweight``.
        outlier_index: int64, the outlier dimensions where they are fixed; None finds them in ``x``.
        outlier_threshold: magnitude from which on a value is an outlier; not read where the dimensions are fixed.
        outlier_dtype: FP32 or BF16, in which outlier dimensions are multiplied.
        out_dtype: dtype of the result; both products are added in FP32.

    Returns:
        (..., N) of ``out_dtype``.
    """
    if outlier_index is None:
        is_outlier = outlier_dimensions(x, outlier_threshold)
    else:
        is_outlier = torch.zeros(x.shape[-1], dtype=torch.bool).index_fill(0, outlier_index, True)
    if outlier_index is not None and outlier_weight is not None:
        factors = x.index_select(-1, outlier_index).to(outlier_dtype)
        outliers = torch.matmul(factors, outlier_weight.to(outlier_dtype).t())
    else:
        outliers = outlier_product_reference(x, is_outlier, outlier_weight, qweight, weight_scale, outlier_dtype)
    levels, scale = quantize_activation(x.float().masked_fill(is_outlier, 0.0), None, None)
    result = integer_product(levels, qweight).float() * scale * weight_scale + outliers.float()
    if bias is not None:
        result = result + bias.float()
    return result.to(out_dtype)


def _linear_decomposed_fake(
    x: Tensor,
    qweight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    outlier_weight: Tensor | None,
    outlier_index: Tensor | None,
    outlier_threshold: float,
    outlier_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], qweight.shape[0]), dtype=out_dtype)


for _name, _reference, _fake in (
    ("linear_zeropoint", linear_zeropoint_reference, _linear_zeropoint_fake),
    ("linear_decomposed", linear_decomposed_reference, _linear_decomposed_fake),
    ("outlier_product", outlier_product_reference, _outlier_product_fake),
):
    _library.impl(_name, _reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"int8::{_name}", _fake, lib=_library)


def _own(x: Tensor) -> Tensor:
    """A copy of ``x`` that the graph owns, so that a fused kernel may accumulate into it."""
    return x.clone()


_library.impl("own", _own, "CompositeExplicitAutograd")
torch.library.register_fake("int8::own", _own, lib=_library)
