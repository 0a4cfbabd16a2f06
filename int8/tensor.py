"""The quantized weight of a linear, on torchao's interfaces.

:class:`Int8Weight` is torchao's ``Int8Tensor`` with our arithmetic: the same fields, so it saves and loads as
torchao's own class, but its ``linear`` is the single operator ``int8::linear``. It is ISA-neutral; kernels pack it
when a model is compiled.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchao.quantization import Int8Tensor, PerRow, PerTensor
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


def quantize_weight(weight: Tensor, bits: WeightBits) -> tuple[Tensor, Tensor]:
    """Symmetric levels of a weight, one scale an output row.

    Args:
        weight: (N, K), any float dtype, finite.
        bits: 8 for levels -127..127, 7 for -63..63.

    Returns:
        (N, K) int8 levels and (N,) FP32 scales, positive also for an all-zero row.
    """
    value = weight.detach().float()
    scale = (value.abs().amax(dim=1) / weight_levels(bits)).clamp(min=_TINY)
    levels = torch.round(value / scale[:, None]).clamp(-weight_levels(bits), weight_levels(bits))
    return levels.to(torch.int8), scale


class Int8Weight(Int8Tensor):  # type: ignore[misc]
    """An (N, K) INT8 weight with what its activation needs: smoothing multiplier and, if static, the scale.

    Build it with :meth:`from_float`; the fields are those of torchao's ``Int8Tensor``.
    """

    @classmethod
    def from_float(
        cls,
        weight: Tensor,
        *,
        bits: WeightBits,
        smoothing_factor: Tensor | None = None,
        act_scale: Tensor | None = None,
        dynamic: bool = False,
    ) -> Int8Weight:
        """Quantize ``weight`` (N, K) after multiplying its columns by ``smoothing_factor`` (K,).

        Args:
            weight: the linear's weight.
            bits: see :func:`quantize_weight`.
            smoothing_factor: SmoothQuant's s, or None for none.
            act_scale: () scale of the smoothed activation; required unless ``dynamic``.
            dynamic: compute one activation scale a token at run time.

        Raises:
            QuantizationError: an inner size at which an INT32 accumulator could overflow, non-finite or FP16 weights,
                or a missing scale.
        """
        if weight.dtype not in (torch.float32, torch.bfloat16):
            raise QuantizationError(
                f"weights are {weight.dtype}; int8 quantizes float32 and bfloat16 models, convert the model first"
            )
        if weight.shape[1] > ops.max_inner_size(unsigned_activation=True):
            raise QuantizationError(
                f"inner size {weight.shape[1]} could overflow an INT32 accumulator (limit {ops.max_inner_size(True)}); "
                "leave this linear in floating point"
            )
        if not bool(torch.isfinite(weight).all()):
            raise QuantizationError("the weight holds NaN or infinity; repair the checkpoint before quantizing it")
        if dynamic == (act_scale is not None):
            raise QuantizationError(
                "a static weight needs act_scale, a dynamic one computes it: give exactly one of them"
            )
        smoothed = weight.detach().float()
        if smoothing_factor is not None:
            smoothed = smoothed * smoothing_factor
        levels, scale = quantize_weight(smoothed, bits)
        return cls(
            levels,
            scale[:, None],
            [1, weight.shape[1]],
            weight.dtype,
            act_quant_scale=None if act_scale is None else act_scale.detach().float().reshape(1, 1),
            act_pre_scale=None if smoothing_factor is None else smoothing_factor.float().reciprocal(),
            act_quant_kwargs=QuantizeTensorToInt8Kwargs(PerRow() if dynamic else PerTensor(), reduce_range=False),
            reduce_range=bits == 7,
        )

    @classmethod
    def from_torchao(cls, weight: Int8Tensor) -> Int8Weight:
        """The same weight with our arithmetic; shares storage.

        Raises:
            QuantizationError: the tensor represents something that our operator does not compute.
        """
        _check_expressible(weight)
        return cls(*_fields(weight))

    def to_torchao(self) -> Int8Tensor:
        """The same weight as torchao's own class, the form in which it is saved; shares storage."""
        return Int8Tensor(*_fields(self))

    @property
    def dynamic(self) -> bool:
        """True if activations get one scale a token at run time."""
        return self.act_quant_scale is None

    @property
    def bits(self) -> WeightBits:
        """8, or 7 if the levels keep to what a kernel without VNNI can add without saturation."""
        return 7 if self.reduce_range else 8

    def operands(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """(qweight, weight_scale (N,), act_multiplier (K,) or None, act_scale () or None) as ``int8::linear`` takes
        them.
        """
        act_scale = None if self.act_quant_scale is None else self.act_quant_scale.reshape(())
        return self.qdata, self.scale.reshape(-1), self.act_pre_scale, act_scale


def _fields(weight: Int8Tensor) -> tuple[Any, ...]:
    return (
        weight.qdata,
        weight.scale,
        weight.block_size,
        weight.dtype,
        None,
        weight.act_quant_scale,
        None,
        weight.act_pre_scale,
        weight.act_quant_kwargs,
        weight.reduce_range,
    )


def _check_expressible(weight: Int8Tensor) -> None:
    kwargs = weight.act_quant_kwargs
    if kwargs is None:
        raise QuantizationError("weight-only INT8 tensors are not run by int8; quantize the activations too")
    if weight.qdata.ndim != 2 or weight.scale.numel() != weight.qdata.shape[0]:
        raise QuantizationError("only 2-D weights with one scale an output row are supported")
    for name in ("zero_point", "act_quant_zero_point"):
        point = getattr(weight, name)
        if point is not None and bool(torch.count_nonzero(point)):
            raise QuantizationError(f"asymmetric tensors ({name} is not zero) are not supported yet")
    if weight.act_quant_scale is not None and weight.act_quant_scale.numel() != 1:
        raise QuantizationError(
            "the static activation scale has one value a calibration row; "
            "quantize with granularity=[PerTensor(), PerRow()]"
        )
    if weight.act_quant_scale is None and not isinstance(kwargs.granularity, PerRow):
        raise QuantizationError("dynamic activations need one scale a token (granularity PerRow)")


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
    qweight, weight_scale, multiplier, act_scale = weight.operands()
    result: Tensor = torch.ops.int8.linear(
        x, qweight, weight_scale, bound.get("bias"), multiplier, act_scale, output_dtype(x)
    )
    return result


torch.serialization.add_safe_globals([Int8Weight])
