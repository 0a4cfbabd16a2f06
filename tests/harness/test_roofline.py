"""Rooflines and ceilings against values computed by hand, the paper's among them."""

from __future__ import annotations

import pytest

from harness import roofline
from harness.roofline import EncoderShape, Machine, Precision, Product
from harness.time_split import Kernel

LARGE = EncoderShape(layers=24, hidden=1024, intermediate=4096, heads=16)
FFN1 = Product("first FFN linear", "linear", m=1024, n=4096, k=1024, calls=24)
#: Round numbers: 100 operations a byte of memory balance FP32, 400 INT8.
MACHINE = Machine(
    operations={"fp32": 1e12, "int8": 4e12},
    bandwidth={"l2": 100e9, "l3": 40e9, "memory": 10e9},
    capacity={"l2": 4 << 20, "l3": 32 << 20},
)


# --- products ---------------------------------------------------------------------------------------------------------


def test_the_linears_of_bert_large_by_hand() -> None:
    found = roofline.linears(LARGE, batch=8, seq=128, joint=24)
    assert [(p.m, p.n, p.k, p.calls) for p in found] == [
        (1024, 3072, 1024, 24),
        (1024, 1024, 1024, 24),
        (1024, 4096, 1024, 24),
        (1024, 1024, 4096, 24),
    ]
    # 12 hidden^2 weights a layer, two operations a weight and token
    assert sum(p.calls * p.operations for p in found) == 2 * 1024 * 24 * 12 * 1024**2
    assert sum(p.calls * p.weight_elements for p in found) == 24 * 12 * 1024**2


def test_projections_apart_are_one_shape_called_four_times_a_layer() -> None:
    apart = roofline.linears(LARGE, 8, 128, joint=0)
    joint = roofline.linears(LARGE, 8, 128, joint=24)
    assert [(p.n, p.calls) for p in apart] == [(1024, 96), (4096, 24), (1024, 24)]
    assert sum(p.calls * p.operations for p in apart) == sum(p.calls * p.operations for p in joint)


def test_attentions_products_by_hand() -> None:
    scores, context, fused = roofline.attention(LARGE, batch=8, seq=128)
    assert (scores.batch, scores.m, scores.n, scores.k) == (128, 128, 128, 64)
    assert (context.batch, context.m, context.n, context.k) == (128, 128, 64, 128)
    assert scores.operations == context.operations == 2 * 128 * 128 * 128 * 64
    assert fused.operations == scores.operations + context.operations  # 0.54 GFLOP
    assert fused.operations == 536_870_912
    # The fused kernel moves query, key, value and result alone: never the scores
    elements = (fused.input_elements, fused.weight_elements, fused.output_elements)
    assert elements == (1 << 20, 2 << 20, 1 << 20)
    assert scores.output_elements == context.input_elements == 128 * 128 * 128


def test_dtypes_follow_the_recipe() -> None:
    assert roofline.precision("linear", True, "fp32") == Precision("int8", "fp32")
    assert roofline.precision("linear", True, "bf16") == Precision("int8", "bf16")
    assert roofline.precision("attention", True, "bf16") == Precision("bf16", "bf16")
    assert roofline.precision("linear", False, "fp32") == Precision("fp32", "fp32")


# --- roofs ------------------------------------------------------------------------------------------------------------


def test_intensity_by_hand() -> None:
    point = roofline.place(FFN1, Precision("fp32", "fp32"), MACHINE, weight_bytes=1 << 30)
    # 2 * 1024 * 4096 * 1024 operations; X 4 MiB, W 16 MiB, Y 16 MiB
    assert point.bytes_moved == 36 << 20
    assert point.intensity == pytest.approx(2 * 1024 * 4096 * 1024 / (36 << 20))
    assert point.intensity == pytest.approx(227.6, abs=0.1)
    assert (point.weights_from, point.activations_from) == ("memory", "l3")


def test_below_the_balance_point_bandwidth_bounds_above_it_arithmetic() -> None:
    assert roofline.balance_point(1e12, 10e9) == 100.0
    assert roofline.attainable(1e12, 50.0, 10e9) == 0.5e12
    assert roofline.attainable(1e12, 100.0, 10e9) == 1e12
    assert roofline.attainable(1e12, 500.0, 10e9) == 1e12


def test_bandwidths_mix_by_the_time_that_each_part_takes() -> None:
    # 10 bytes at 10 a second and 10 at 40: 1.25 seconds for 20 bytes
    assert roofline.effective_bandwidth([(10, 10.0), (10, 40.0)]) == pytest.approx(16.0)
    assert roofline.effective_bandwidth([(7, 3.0)]) == pytest.approx(3.0)


def test_int8_weights_in_the_last_level_cache_raise_the_roof() -> None:
    dtypes = Precision("int8", "fp32")
    outside = roofline.place(FFN1, dtypes, MACHINE, weight_bytes=40 << 20)
    inside = roofline.place(FFN1, dtypes, MACHINE, weight_bytes=12 << 20)
    assert (outside.weights_from, inside.weights_from) == ("memory", "l3")
    # W 4 MiB, X and Y 17 MiB: they fit beside 12 MiB of weights
    assert inside.activations_from == "l3"
    assert outside.bandwidth == pytest.approx(21 / (4 / 10e9 + 17 / 40e9))
    assert inside.bandwidth == pytest.approx(40e9)
    assert inside.balance < outside.balance  # as the paper says of its adjusted model
    assert inside.attainable >= outside.attainable


def test_activations_make_room_for_weights() -> None:
    point = roofline.place(FFN1, Precision("int8", "fp32"), MACHINE, weight_bytes=20 << 20)
    assert (point.weights_from, point.activations_from) == ("l3", "memory")  # 17 + 20 > 32 MiB


def test_small_activations_come_from_l2_and_unmeasured_levels_are_passed_over() -> None:
    small = Product("small", "linear", m=128, n=384, k=384, calls=1)
    assert roofline.place(small, Precision("int8", "fp32"), MACHINE, 64 << 20).activations_from == "l2"
    only_memory = Machine(MACHINE.operations, {"memory": 10e9}, MACHINE.capacity)
    point = roofline.place(small, Precision("int8", "fp32"), only_memory, 1)
    assert (point.weights_from, point.activations_from, point.bandwidth) == ("memory", "memory", 10e9)


def test_fraction_is_what_is_measured_of_what_is_attainable() -> None:
    import dataclasses

    point = roofline.place(FFN1, Precision("fp32", "fp32"), MACHINE, 1 << 30)
    assert point.measured is None
    assert point.fraction is None
    assert point.bound == "compute"
    timed = dataclasses.replace(point, seconds=2 * FFN1.operations / 1e12)
    assert timed.measured == pytest.approx(0.5e12)
    assert timed.fraction == pytest.approx(0.5)
    assert roofline.roof_seconds([point]) == pytest.approx(24 * FFN1.operations / 1e12)


# --- ceilings ---------------------------------------------------------------------------------------------------------


def test_amdahl_by_hand() -> None:
    assert roofline.amdahl(0.5, 2.0, 1.0) == pytest.approx(4 / 3)
    assert roofline.amdahl(1.0, 4.0, 1.0) == 4.0
    assert roofline.amdahl(0.0, 4.0, 1.2) == pytest.approx(1.2)
    for wrong in ((1.1, 2.0, 1.0), (0.5, 0.0, 1.0), (0.5, 1.0, -1.0)):
        with pytest.raises(ValueError, match="no share and gains"):
            roofline.amdahl(*wrong)


def test_the_papers_ceiling_on_ice_lake() -> None:
    """f = 0.89, g = 4.0, h = 1.20 give 3.18; the paper prints 3.15, which its f before rounding (0.885) gives."""
    assert roofline.amdahl(0.89, 4.0, 1.20) == pytest.approx(3.183, abs=0.001)
    assert roofline.amdahl(0.89, 4.0, 1.20) == pytest.approx(3.15, rel=0.011)
    assert roofline.amdahl(0.885, 4.0, 1.20) == pytest.approx(3.15, abs=0.005)
    reached = 2.58 / 3.15
    assert reached == pytest.approx(0.82, abs=0.005)  # "about 82 % of the ceiling"


def test_the_papers_ceiling_on_granite_rapids() -> None:
    """Its g is not in the text: f = 0.87, h = 2.06 and 7.06 leave 11.1, above the 8.7 and 9.9 that it measured."""
    g = 0.87 / (1 / 7.06 - (1 - 0.87) / 2.06)
    assert g == pytest.approx(11.1, abs=0.05)
    assert roofline.amdahl(0.87, g, 2.06) == pytest.approx(7.06)
    assert g > 9.9


def test_a_recipes_ceiling_by_hand() -> None:
    found = roofline.ceiling(
        linear_s=0.8, rest_s=0.2, baseline_roof_s=0.4, roof_s=0.1, rest_gain=2.0, speedup=2.5, linear_speedup=6.0
    )
    assert (found.linear_share, found.linear_gain) == (pytest.approx(0.8), pytest.approx(4.0))
    assert found.ceiling == pytest.approx(1 / (0.2 + 0.1))
    assert found.at_roof == pytest.approx(1 / (0.1 + 0.1))  # FP32 is at half its roof, so more than g is there to win
    assert found.reached == pytest.approx(0.75)
    assert roofline.ceiling(linear_s=1, rest_s=1, baseline_roof_s=1, roof_s=1, rest_gain=1).reached is None


# --- kernels of a profile ---------------------------------------------------------------------------------------------

MINILM = EncoderShape(layers=6, hidden=384, intermediate=1536, heads=12)


def kernel(name: str, kind: str, seconds: float, *shapes: tuple[int, ...]) -> Kernel:
    return Kernel(name, kind, shapes, 6, seconds)  # type: ignore[arg-type]


def test_kernels_are_recognised_by_the_shapes_they_were_given() -> None:
    products = (*roofline.linears(MINILM, 8, 128, joint=0), *roofline.attention(MINILM, 8, 128))
    kernels = [
        kernel("mkl::_mkl_linear", "linear", 1.0, (1024, 384), (1459233, 1), (384, 384)),
        kernel("onednn::qlinear_pointwise", "linear", 2.0, (1024, 384), (384, 1536), (1536,), (1536,)),
        kernel("mkldnn::_linear_pointwise", "linear", 3.0, (8, 128, 1536), (384, 1536), (384,)),
        kernel("aten::mm", "linear", 9.0, (8, 384), (384, 2)),  # a head: no product of the encoder
        kernel("aten::_scaled_dot_product_flash_attention_for_cpu", "attention", 4.0, *[(8, 12, 128, 32)] * 3),
    ]
    assert roofline.seconds_of(products, kernels) == {
        "query, key, value, attention output": 1.0,
        "first FFN linear": 2.0,
        "second FFN linear": 3.0,
        roofline.FUSED_ATTENTION: 4.0,
    }


def test_packed_weights_residuals_and_batched_products_are_recognised() -> None:
    # M equals K here, so that a residual (M, N) looks like an input
    products = (*roofline.linears(LARGE, 8, 128, joint=24), *roofline.attention(LARGE, 8, 128))
    packed = 1024 * 4096 + 4 * 1024
    kernels = [
        kernel("int8::gemm", "linear", 1.0, (8, 128, 1024), (3072 * 1024 + 4 * 3072,), (3072,), (3072,)),
        kernel("int8::gemm", "linear", 2.0, (1024, 1024), (1024 * 1024 + 4 * 1024,), (1024,), (1024, 1024)),
        kernel("int8::gemm", "linear", 3.0, (1024, 1024), (4096 * 1024 + 4 * 4096,), (4096,)),
        kernel("int8::gemm", "linear", 4.0, (1024, 4096), (packed,), (1024,), (1024, 1024)),
        kernel("aten::bmm", "attention", 5.0, (128, 128, 64), (128, 64, 128)),
        kernel("aten::bmm", "attention", 6.0, (128, 128, 128), (128, 128, 64)),
    ]
    found = roofline.seconds_of(products, kernels)
    assert list(found.values()) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert set(found) == {product.label for product in products} - {roofline.FUSED_ATTENTION}


def test_joint_projections_are_counted_in_the_profile() -> None:
    joint = kernel("int8::gemm", "linear", 1.0, (1024, 384), (1152 * 384 + 4 * 1152,))
    apart = kernel("onednn::qlinear_pointwise", "linear", 1.0, (1024, 384), (384, 384))
    assert roofline.joint_layers(MINILM, [joint]) == 6
    assert roofline.joint_layers(MINILM, [apart]) == 0
    assert roofline.joint_layers(MINILM, []) == 0
    some = Kernel(joint.name, "linear", joint.shapes, 2, 1.0)
    assert roofline.joint_layers(MINILM, [some, apart]) == 2
    together, square, *_ = roofline.linears(MINILM, 8, 128, joint=2)
    assert (together.n, together.calls) == (1152, 2)
    assert (square.n, square.calls) == (384, 6 + 3 * 4)


def test_a_weight_that_the_profiler_does_not_show_is_told_by_its_scales() -> None:
    """As `int8::gemm` appears: levels, scales, bias, and what is fused; the packed weight is opaque."""
    products = roofline.linears(LARGE, 8, 128, joint=24)
    kernels = [
        kernel("int8::gemm", "linear", 1.0, (8, 128, 1024), (3072,), (3072,), (1024,)),  # with a scale a row
        kernel("int8::gemm", "linear", 2.0, (8, 128, 1024), (1024,), (1024,), (8, 128, 1024)),  # with a residual
        kernel("int8::gemm", "linear", 3.0, (8, 128, 1024), (4096,), (4096,), (4096,)),
        kernel("int8::gemm", "linear", 4.0, (1024, 4096), (1024,), (1024,), (1024, 1024)),
    ]
    assert list(roofline.seconds_of(products, kernels).values()) == [1.0, 2.0, 3.0, 4.0]
    assert roofline.joint_layers(LARGE, kernels) == 6
