"""Splitting a pass into linears, attention and the rest: names, nesting, medians, and a real profile."""

from __future__ import annotations

import pytest

from harness import time_split
from harness.time_split import Kernel, Pass


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mkl::_mkl_linear", "linear"),
        ("mkldnn::_linear_pointwise", "linear"),
        ("onednn::qlinear_pointwise", "linear"),
        ("aten::addmm", "linear"),
        ("aten::mm", "linear"),
        ("aten::_int_mm", "linear"),
        ("int8::gemm", "linear"),
        ("int8::linear_static", "linear"),
        ("int8::outlier_product", "linear"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::scaled_dot_product_attention", "attention"),
        ("int8::attention", "attention"),
        ("aten::bmm", "attention"),
        ("int8::quantize_rows", "other"),
        ("int8::layer_norm", "other"),
        ("aten::matmul", "other"),
        ("aten::native_layer_norm", "other"),
        ("Torch-Compiled Region: 0/0", "other"),
    ],
)
def test_operators_are_told_apart_by_name(name: str, kind: str) -> None:
    assert time_split.kind_of(name) == kind


def test_a_split_is_the_median_of_each_part() -> None:
    found = time_split.split([Pass(10.0, 6.0, 1.0, 6), Pass(12.0, 7.0, 1.5, 6), Pass(30.0, 6.5, 1.2, 6)], 6)
    assert found is not None
    assert (found.linear, found.attention) == (6.5, 1.2)
    assert found.other == pytest.approx(3.5)


def test_linears_that_the_profiler_did_not_see_are_not_taken_for_the_rest() -> None:
    assert time_split.split([], 6) is None
    assert time_split.split([Pass(1.0, 0.0, 0.0, 0)], None) is None
    assert time_split.split([Pass(1.0, 0.5, 0.1, 4)], 6) is not None  # query, key and value in one
    assert time_split.split([Pass(1.0, 0.5, 0.1, 6), Pass(1.0, 0.5, 0.1, 3)], 6) is None


def test_a_kernel_comes_back_from_json() -> None:
    kernel = Kernel("int8::gemm", "linear", ((8, 16), (32, 16)), 3, 0.5)
    data = {"name": "int8::gemm", "kind": "linear", "shapes": [[8, 16], [32, 16]], "calls": 3, "seconds": 0.5}
    assert Kernel.from_json(data) == kernel


def test_rounds_of_one_pass_are_merged_by_name_and_shapes() -> None:
    rounds = [Kernel("int8::gemm", "linear", ((8, 16),), 3, seconds) for seconds in (0.1, 0.9, 0.2)]
    other = Kernel("int8::gemm", "linear", ((8, 32),), 3, 0.5)
    assert time_split.merged([*rounds, other]) == (Kernel("int8::gemm", "linear", ((8, 16),), 3, 0.2), other)


def test_a_real_pass_is_split_and_its_kernels_have_shapes() -> None:
    import torch
    from torch import nn
    from torch.nn import functional

    first, second = nn.Linear(64, 256), nn.Linear(256, 64)
    x = torch.randn(96, 64)

    def forward() -> torch.Tensor:
        hidden = second(functional.gelu(first(x))).view(2, 4, 12, 64)
        return functional.scaled_dot_product_attention(hidden, hidden, hidden)

    with torch.no_grad():
        found = time_split.profile(forward, seconds=0.0, min_passes=3, max_passes=3)
    assert len(found.passes) == 3
    for one in found.passes:
        assert one.linear_s > 0
        assert one.attention_s > 0
        assert one.linear_s + one.attention_s < one.total_s  # GELU is neither
        assert one.linear_calls == 2
    linears = [kernel for kernel in found.kernels if kernel.kind == "linear"]
    assert [kernel.calls for kernel in linears] == [1, 1]  # nothing is counted with what it calls
    assert any((96, 64) in kernel.shapes and (256, 64) in kernel.shapes for kernel in linears)
    assert sum(kernel.calls for kernel in found.kernels if kernel.kind == "attention") == 1
