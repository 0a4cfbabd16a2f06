"""The quantized weight of a linear, on torchao's interfaces.

:class:`Int8Weight` is torchao's ``Int8Tensor`` with our arithmetic: the same fields, so it saves and loads as
torchao's own class, but its ``linear`` is one operator of :mod:`int8.ops`. It is ISA-neutral; kernels pack it when a
model is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchao.quantization import Int8Tensor, MappingType, PerRow, PerTensor
from torchao.quantization.quantize_.workflows import QuantizeTensorToInt8Kwargs

from int8 import ops
from int8.errors import QuantizationError

WeightBits = Literal[7, 8]

_LEVELS: dict[int, int] = {7: 63, 8: 127}

#: Smallest scale: an all-zero row gets it, so that nothing is ever divided by zero.
_TINY = 1e-30


def weight_levels(bits: WeightBits) -> int:
    """The largest weight level: 127, or 63 where a kernel adds two u8 x s8 products in 16 bit (2 * 255 * 63 <
    2**15).
    """
    return _LEVELS[bits]


def quantize_weight(weight: Tensor, bits: WeightBits, per_tensor: bool = False) -> tuple[Tensor, Tensor]:
    """Symmetric levels of a weight, one scale an output row or one in all.

    Args:
        weight: (N, K), any float dtype, finite.
        bits: 8 for levels -127..127, 7 for -63..63.
        per_tensor: one scale for the whole weight.

    Returns:
        (N, K) int8 levels and (N,) or (1,) FP32 scales, positive also for an all-zero row.
    """
    value = weight.detach().float()
    absmax = value.abs().amax().reshape(1) if per_tensor else value.abs().amax(dim=1)
    scale = (absmax / weight_levels(bits)).clamp(min=_TINY)
    levels = torch.round(value / scale[:, None]).clamp(-weight_levels(bits), weight_levels(bits))
    return levels.to(torch.int8), scale


@dataclass(frozen=True)
class LinearCall:
    """How a quantized weight is multiplied: ``operator(x, bias=..., out_dtype=..., **tensors, **constants)``."""

    operator: Any
    tensors: Mapping[str, Tensor | None]
    constants: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """(..., N) from ``x`` (..., K), in the dtype that ``nn.Linear`` would give."""
        result: Tensor = self.operator(x, bias=bias, out_dtype=output_dtype(x), **self.tensors, **self.constants)
        return result


def check_weight(weight: Tensor) -> None:
    """Refuse an (N, K) weight that cannot be quantized.

    Raises:
        QuantizationError: an inner size at which an INT32 accumulator could overflow, non-finite or FP16 weights.
    """
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise QuantizationError(
            f"weights are {weight.dtype}; int8 quantizes float32 and bfloat16 models, convert the model first"
        )
    _check_inner_size(int(weight.shape[1]))
    if not bool(torch.isfinite(weight).all()):
        raise QuantizationError("the weight holds NaN or infinity; repair the checkpoint before quantizing it")


def _check_inner_size(inner: int) -> None:
    if inner > ops.max_inner_size(unsigned_activation=True):
        raise QuantizationError(
            f"inner size {inner} could overflow an INT32 accumulator (limit {ops.max_inner_size(True)}); "
            "leave this linear in floating point"
        )


class Int8Weight(Int8Tensor):  # type: ignore[misc]
    """An (N, K) INT8 weight with what its activation needs: smoothing multiplier and, if static, the scale.

    Build it with :meth:`from_float`; the fields are those of torchao's ``Int8Tensor``, and one more: ``act_shift``
    (K,), subtracted from an affine activation before it is smoothed (its effect is in the linear's bias), or None.
    """

    optional_tensor_data_names = [*Int8Tensor.optional_tensor_data_names, "act_shift"]  # noqa: RUF012 - torchao's protocol

    act_shift: Tensor | None

    def __new__(cls, *args: Any, act_shift: Tensor | None = None, **kwargs: Any) -> Any:
        return super().__new__(cls, *args, **kwargs)

    def __init__(self, *args: Any, act_shift: Tensor | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.act_shift = act_shift

    @classmethod
    def from_float(
        cls,
        weight: Tensor,
        *,
        bits: WeightBits,
        smoothing_factor: Tensor | None = None,
        act_scale: Tensor | None = None,
        dynamic: bool = False,
        act_per_tensor: bool = False,
        per_tensor: bool = False,
        act_affine: bool = False,
        act_shift: Tensor | None = None,
        act_zero_point: Tensor | None = None,
    ) -> Int8Weight:
        """Quantize ``weight`` (N, K) after multiplying its columns by ``smoothing_factor`` (K,).

        Args:
            weight: the linear's weight.
            bits: see :func:`quantize_weight`.
            smoothing_factor: SmoothQuant's s, or None for none.
            act_scale: () scale of the smoothed activation; required unless ``dynamic``.
            dynamic: compute activation scales at run time, one a token.
            act_per_tensor: if dynamic, compute one for the whole activation instead.
            per_tensor: one scale for the whole weight instead of one an output row.
            act_affine: the activation has a zero point: ``act_zero_point`` () if static, else one a token.
            act_shift: (K,) subtracted from an affine activation; the caller adds ``weight @ act_shift`` to the bias.

        Raises:
            QuantizationError: an inner size at which an INT32 accumulator could overflow, non-finite or FP16 weights,
                or a missing scale.
        """
        check_weight(weight)
        if dynamic == (act_scale is not None):
            raise QuantizationError(
                "a static weight needs act_scale, a dynamic one computes it: give exactly one of them"
            )
        if act_affine and (act_zero_point is None) != dynamic:
            raise QuantizationError("an affine activation has a calibrated act_zero_point exactly if it is static")
        if act_shift is not None and not act_affine:
            raise QuantizationError("only affine activations are shifted; set act_affine")
        smoothed = weight.detach().float()
        if smoothing_factor is not None:
            smoothed = smoothed * smoothing_factor
        levels, scale = quantize_weight(smoothed, bits, per_tensor)
        granularity = PerRow() if dynamic and not act_per_tensor else PerTensor()
        return cls(
            levels,
            scale[:, None],
            list(weight.shape) if per_tensor else [1, weight.shape[1]],
            weight.dtype,
            act_quant_scale=None if act_scale is None else act_scale.detach().float().reshape(1, 1),
            act_pre_scale=None if smoothing_factor is None else smoothing_factor.float().reciprocal(),
            act_quant_zero_point=None
            if act_zero_point is None
            else act_zero_point.detach().to(torch.int8).reshape(1, 1),
            act_quant_kwargs=QuantizeTensorToInt8Kwargs(
                granularity, MappingType.ASYMMETRIC if act_affine else MappingType.SYMMETRIC
            ),
            reduce_range=bits == 7,
            act_shift=act_shift,
        )

    @classmethod
    def from_float_affine(cls, weight: Tensor, *, bits: WeightBits) -> Int8Weight:
        """Quantize ``weight`` (N, K) with a zero point, for activations that get one at run time.

        Levels reach -127..127 with 8 bits. With 7 they keep to -63..63: it is the levels that an unsigned x signed
        kernel multiplies, the zero point comes in afterwards.

        Raises:
            QuantizationError: as :meth:`from_float`.
        """
        check_weight(weight)
        levels, scale, zero_point = ops.quantize_affine(weight.detach(), weight_levels(bits))
        return cls(
            levels,
            scale.reshape(1, 1),
            list(weight.shape),
            weight.dtype,
            zero_point=zero_point.reshape(1, 1),
            act_quant_kwargs=QuantizeTensorToInt8Kwargs(PerTensor(), mapping_type=MappingType.ASYMMETRIC),
            reduce_range=bits == 7,
        )

    @classmethod
    def from_torchao(cls, weight: Int8Tensor) -> Int8Weight:
        """The same weight with our arithmetic; shares storage.

        Raises:
            QuantizationError: the tensor represents something that our operator does not compute.
        """
        _check_expressible(weight)
        return cls(*tensor_fields(weight))

    def to_torchao(self) -> Int8Tensor:
        """The same weight as torchao's own class, the form in which it is saved; shares storage. It has no place for
        ``act_shift``, which is saved beside it.
        """
        return Int8Tensor(*tensor_fields(self))

    def shifted(self, act_shift: Tensor) -> Int8Weight:
        """The same weight with a shift of its affine activation, (K,); shares storage."""
        return Int8Weight(*tensor_fields(self), act_shift=act_shift)

    @property
    def act_affine(self) -> bool:
        """True if the activation has a zero point and the weight has none."""
        return _asymmetric(self) and not _both_affine(self)

    @property
    def dynamic(self) -> bool:
        """True if activations get their scales at run time."""
        return self.act_quant_scale is None

    @property
    def act_per_tensor(self) -> bool:
        """True if one scale covers the whole activation."""
        return self.act_quant_scale is not None or isinstance(self.act_quant_kwargs.granularity, PerTensor)

    @property
    def asymmetric(self) -> bool:
        """True if weight and activation have zero points."""
        return _both_affine(self)

    @property
    def bits(self) -> WeightBits:
        """8, or 7 if the levels keep to what a kernel without VNNI can add without saturation."""
        return 7 if self.reduce_range else 8

    def operands(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """(qweight, weight_scale (N,), act_multiplier (K,) or None, act_scale () or None) as ``int8::linear`` takes
        them.
        """
        act_scale = None if self.act_quant_scale is None else self.act_quant_scale.reshape(())
        return self.qdata, self.row_scales(), self.act_pre_scale, act_scale

    def describe(self) -> str:
        """What is quantized and how, in a few words; follows the shapes of the scales, not a label."""
        kind = "dynamic" if self.dynamic else "static"
        over = "one scale a tensor" if self.act_per_tensor else "one scale a token"
        rows = "a weight" if self.scale.numel() == 1 else "a row"
        smoothed = ", smoothed" if self.act_pre_scale is not None else ""
        affine = ", affine" if self.act_affine else ", with zero points" if self.asymmetric else ""
        extra = smoothed + affine + (", shifted" if self.act_shift is not None else "")
        return f"{kind}, {over}{extra}, {self.bits}-bit weights with one scale {rows}"

    def row_scales(self) -> Tensor:
        """(N,) weight scale of each output row, also where all rows share one."""
        scale: Tensor = self.scale.reshape(-1)
        rows = self.qdata.shape[0]
        return scale if scale.numel() == rows else scale.expand(rows).contiguous()

    def linear_call(self) -> LinearCall:
        """The operator that multiplies by this weight, with its operands."""
        if self.asymmetric:
            tensors = {
                "qweight": self.qdata,
                "weight_scale": self.scale.reshape(()),
                "weight_zero_point": self.zero_point.reshape(()),
            }
            return LinearCall(torch.ops.int8.linear_zeropoint, tensors)
        names = ("qweight", "weight_scale", "act_multiplier", "act_scale")
        tensors = dict(zip(names, self.operands(), strict=True))
        if self.act_affine:
            point = self.act_quant_zero_point
            tensors |= {"act_shift": self.act_shift, "act_zero_point": None if point is None else point.reshape(())}
            return LinearCall(torch.ops.int8.linear, tensors, {"act_affine": True})
        constants = {"act_per_tensor": True} if self.dynamic and self.act_per_tensor else {}
        return LinearCall(torch.ops.int8.linear, tensors, constants)


def tensor_fields(weight: Int8Tensor) -> tuple[Any, ...]:
    return (
        weight.qdata,
        weight.scale,
        weight.block_size,
        weight.dtype,
        weight.zero_point if _both_affine(weight) else None,
        weight.act_quant_scale,
        weight.act_quant_zero_point if _asymmetric(weight) else None,
        weight.act_pre_scale,
        weight.act_quant_kwargs,
        weight.reduce_range,
    )


def _asymmetric(weight: Int8Tensor) -> bool:
    return weight.act_quant_kwargs is not None and weight.act_quant_kwargs.mapping_type is MappingType.ASYMMETRIC


def _both_affine(weight: Int8Tensor) -> bool:
    """True for recipe zeropoint: one scale and one zero point on both sides, the activation's computed at run time."""
    dynamic = weight.act_quant_scale is None and isinstance(weight.act_quant_kwargs.granularity, PerTensor)
    return _asymmetric(weight) and dynamic and weight.zero_point is not None


def _check_expressible(weight: Int8Tensor) -> None:
    kwargs = weight.act_quant_kwargs
    if kwargs is None:
        raise QuantizationError("weight-only INT8 tensors are not run by int8; quantize the activations too")
    if weight.qdata.ndim != 2 or weight.scale.numel() not in (1, weight.qdata.shape[0]):
        raise QuantizationError("only 2-D weights with one scale an output row, or one in all, are supported")
    _check_inner_size(int(weight.qdata.shape[1]))
    if _both_affine(weight):
        _check_affine(weight)
        return
    if _asymmetric(weight) and (weight.act_quant_scale is None) != (weight.act_quant_zero_point is None):
        raise QuantizationError("an affine activation needs a calibrated scale and zero point, or neither")
    for name in ("zero_point",) if _asymmetric(weight) else ("zero_point", "act_quant_zero_point"):
        point = getattr(weight, name)
        if point is not None and bool(torch.count_nonzero(point)):
            raise QuantizationError(f"symmetric activations with a {name} that is not zero are not supported")
    if weight.act_quant_scale is not None and weight.act_quant_scale.numel() != 1:
        raise QuantizationError(
            "the static activation scale has one value a calibration row; "
            "quantize with granularity=[PerTensor(), PerRow()]"
        )
    if weight.act_quant_scale is None and not isinstance(kwargs.granularity, (PerRow, PerTensor)):
        raise QuantizationError("dynamic activations need one scale a token or one in all (PerRow or PerTensor)")


def _check_affine(weight: Int8Tensor) -> None:
    """Both operands affine, one scale and one zero point each: what ``int8::linear_zeropoint`` computes."""
    fits = (
        isinstance(weight.act_quant_kwargs.granularity, PerTensor)
        and weight.act_quant_scale is None
        and weight.act_pre_scale is None
        and weight.scale.numel() == 1
        and weight.zero_point is not None
        and weight.zero_point.numel() == 1
    )
    if not fits:
        raise QuantizationError(
            "asymmetric activations are supported only where both operands have one scale and one zero point, the "
            "activation's computed at run time (recipe zeropoint)"
        )


def output_dtype(x: Tensor) -> torch.dtype:
    """Dtype of a quantized linear's result: autocast's where it is on, as ``nn.Linear`` gives, else that of its
    input.
    """
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype


@Int8Weight.implements(torch.ops.aten.linear.default)  # type: ignore[untyped-decorator]
@Int8Weight.implements_torch_function(nn.functional.linear)  # type: ignore[untyped-decorator]
def _linear(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    names = ("input", "weight", "bias")
    bound = dict(zip(names, args, strict=False)) | (kwargs or {})
    x, weight = bound["input"], bound["weight"]
    result: Tensor = weight.linear_call()(x, bound.get("bias"))
    return result


torch.serialization.add_safe_globals([Int8Weight, MappingType])
