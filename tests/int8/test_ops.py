"""The operator against plain integer arithmetic, at its edges."""

from __future__ import annotations

import pytest
import torch

from int8 import ops
from int8.errors import QuantizationError
from int8.tensor import Int8Weight, quantize_weight


def reference(levels: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return levels.to(torch.int64) @ weight.to(torch.int64).t()


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 768, 3), (3, 770, 5), (7, 4096, 2)])
def test_integer_product_is_exact(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    levels = torch.randint(-127, 128, (m, k), dtype=torch.int8)
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    assert torch.equal(ops.integer_product(levels, weight).to(torch.int64), reference(levels, weight))


def test_integer_product_at_the_extremes_is_exact() -> None:
    levels = torch.full((2, 8192), 127, dtype=torch.int8)
    weight = torch.full((2, 8192), -128, dtype=torch.int8)
    assert torch.equal(ops.integer_product(levels, weight).to(torch.int64), reference(levels, weight))


def test_single_row_with_zero_stride_is_computed() -> None:
    """``torch._int_mm`` leaves its output unwritten for such a view."""
    row = torch.randint(-127, 128, (1, 512), dtype=torch.int8).as_strided((1, 512), (0, 1))
    weight = torch.randint(-127, 128, (512, 512), dtype=torch.int8)
    assert torch.equal(ops.integer_product(row, weight).to(torch.int64), reference(row, weight))


def test_unsigned_shift_is_undone_by_the_column_sums() -> None:
    levels = torch.randint(-127, 128, (5, 33), dtype=torch.int8)
    weight = torch.randint(-127, 128, (4, 33), dtype=torch.int8)
    shifted = ops.shifted_to_unsigned(levels)
    compensation = ops.UNSIGNED_SHIFT * weight.to(torch.int64).sum(dim=1)
    assert torch.equal(reference(shifted, weight) - compensation, reference(levels, weight))


def test_seven_bit_weights_cannot_saturate_a_pair() -> None:
    """Kernels without VNNI add two u8 x s8 products in 16 bit; 255 * 63 * 2 fits, 255 * 127 * 2 does not."""
    levels, _ = quantize_weight(torch.randn(16, 64) * 10, bits=7)
    assert 2 * 255 * int(levels.abs().max()) < 2**15 <= 2 * 255 * 127


def test_static_levels_round_to_even_and_clip() -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, -1.5, 500.0, -500.0]])
    levels, scale = ops.quantize_activation(x, None, torch.tensor(1.0))
    assert levels.tolist() == [[0, 2, 2, -2, 127, -127]]
    assert scale == 1.0


def test_dynamic_rows_use_the_whole_range() -> None:
    levels, scale = ops.quantize_activation(torch.tensor([[1.0, -2.0], [100.0, 3.0]]), None, None)
    assert levels.abs().amax(dim=1).tolist() == [127, 127]
    assert torch.allclose(levels * scale, torch.tensor([[1.0, -2.0], [100.0, 3.0]]), atol=0.5)


@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-8, 3e38])
def test_extreme_rows_stay_finite(value: float) -> None:
    x = torch.full((2, 8), value)
    x[1] = 1.0
    weight = Int8Weight.from_float(torch.randn(3, 8), bits=8, dynamic=True)
    result = torch.nn.functional.linear(x, weight)
    assert bool(torch.isfinite(result).all()) or value == 3e38
    assert bool(torch.isfinite(result[1]).all())
    if value == 0.0:
        assert result[0].tolist() == [0.0, 0.0, 0.0]


def test_zero_weight_row_gives_zero() -> None:
    weight = torch.randn(4, 8)
    weight[2] = 0
    quantized = Int8Weight.from_float(weight, bits=8, dynamic=True)
    assert bool((quantized.scale > 0).all())
    assert torch.nn.functional.linear(torch.randn(5, 8), quantized)[:, 2].abs().max() == 0


def test_accumulators_above_the_fp16_range_stay_finite() -> None:
    """Scaling happens in FP32 and is cast last."""
    weight = Int8Weight.from_float(torch.ones(2, 4096), bits=8, dynamic=True)
    result = torch.nn.functional.linear(torch.full((1, 4096), 60.0), weight)
    assert torch.allclose(result, torch.full((1, 2), 60.0 * 4096), rtol=0.01)


def test_inner_sizes_that_could_overflow_are_refused() -> None:
    assert ops.max_inner_size(False) * 128 * 128 < 2**31 <= (ops.max_inner_size(False) + 1) * 128 * 128
    assert ops.max_inner_size(True) * 255 * 128 < 2**31 <= (ops.max_inner_size(True) + 1) * 255 * 128
    with pytest.raises(QuantizationError, match="overflow"):
        Int8Weight.from_float(torch.zeros(1, 65_794), bits=8, dynamic=True)


def test_bad_weights_are_refused() -> None:
    with pytest.raises(QuantizationError, match="float16"):
        Int8Weight.from_float(torch.zeros(2, 2, dtype=torch.float16), bits=8, dynamic=True)
    with pytest.raises(QuantizationError, match="NaN"):
        Int8Weight.from_float(torch.tensor([[float("nan"), 1.0]]), bits=8, dynamic=True)
    with pytest.raises(QuantizationError, match="act_scale"):
        Int8Weight.from_float(torch.ones(2, 2), bits=8)


def test_fake_output_matches_the_real_one() -> None:
    weight = Int8Weight.from_float(torch.randn(3, 8), bits=8, dynamic=True)
    qweight, scale, multiplier, act_scale = weight.operands()
    torch.library.opcheck(
        torch.ops.int8.linear.default,
        (torch.randn(2, 4, 8), qweight, scale, None, multiplier, act_scale, torch.float32),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_affine_levels_use_the_whole_range() -> None:
    x = torch.tensor([[-1.0, 0.0, 4.0], [0.0, 0.5, 1.0], [-3.0, -2.0, -1.0]])
    levels, scale, zero = ops.quantize_affine_activation(x, None, None, None, None)
    assert (levels.amin().item(), levels.amax().item()) == (-128, 127)
    assert levels[1].tolist() == [-128, 0, 127]
    assert torch.allclose((levels.float() - zero) * scale, x, atol=float(scale.max()))
    assert zero[0] == levels[0, 1], "zero is a level"


def test_affine_static_levels_clip_and_round_to_even() -> None:
    x = torch.tensor([[-200.0, -0.5, 0.0, 0.5, 1.5, 600.0]])
    levels, _, zero = ops.quantize_affine_activation(x, None, None, torch.tensor(2.0), torch.tensor(-100))
    assert levels.tolist() == [[-128, -100, -100, -100, -99, 127]]
    assert zero == -100


@pytest.mark.parametrize("static", [True, False])
def test_affine_products_equal_the_dequantized_ones(static: bool) -> None:
    torch.manual_seed(0)
    x, weight, shift = torch.randn(6, 40) + 3, torch.randn(7, 40), torch.randn(40)
    calibrated = {"act_scale": torch.tensor(0.05), "act_zero_point": torch.tensor(-70)} if static else {}
    quantized = Int8Weight.from_float(
        weight,
        bits=8,
        smoothing_factor=torch.rand(40) + 0.5,
        dynamic=not static,
        act_affine=True,
        act_shift=shift,
        **calibrated,
    )
    levels, scale, zero = ops.quantize_affine_activation(
        x, quantized.act_pre_scale, shift, calibrated.get("act_scale"), calibrated.get("act_zero_point")
    )
    expected = ((levels.double() - zero.double()) * scale.double()) @ quantized.dequantize().double().t()
    assert torch.allclose(torch.nn.functional.linear(x, quantized).double(), expected, rtol=1e-4, atol=1e-4)


def test_a_zero_token_stays_finite_with_affine_levels() -> None:
    weight = Int8Weight.from_float(torch.randn(3, 8), bits=8, dynamic=True, act_affine=True)
    assert torch.nn.functional.linear(torch.zeros(2, 8), weight).abs().max() == 0


def test_affine_weights_say_what_they_miss() -> None:
    with pytest.raises(QuantizationError, match="act_zero_point"):
        Int8Weight.from_float(torch.ones(2, 2), bits=8, act_scale=torch.tensor(1.0), act_affine=True)
    with pytest.raises(QuantizationError, match="act_affine"):
        Int8Weight.from_float(torch.ones(2, 2), bits=8, dynamic=True, act_shift=torch.ones(2))
