from __future__ import annotations

import pytest
import torch

from int8.calibrate import ChannelStats
from int8.smooth import (
    ALPHAS,
    FACTOR_BOUND,
    ActivationPlan,
    best,
    column_absmax,
    dequantized,
    plan,
    search,
    smoothing_factor,
)
from int8.tensor import quantize_weight


def test_formula_of_the_paper() -> None:
    factor = smoothing_factor(torch.tensor([4.0, 16.0]), torch.tensor([1.0, 4.0]), alpha=0.5)
    assert factor.tolist() == pytest.approx([2.0, 2.0])
    assert smoothing_factor(torch.tensor([8.0]), torch.tensor([2.0]), alpha=1.0).item() == pytest.approx(8.0)
    assert smoothing_factor(torch.tensor([8.0]), torch.tensor([2.0]), alpha=0.0).item() == pytest.approx(0.5)


def test_smoothing_leaves_the_product_as_it_is() -> None:
    x, weight = torch.randn(9, 16), torch.randn(5, 16)
    factor = smoothing_factor(x.abs().amax(dim=0), column_absmax([weight]), 0.7)
    assert torch.allclose((x / factor) @ (weight * factor).t(), x @ weight.t(), atol=1e-4)


@pytest.mark.parametrize(("act", "weight"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_dead_channels_get_one(act: float, weight: float) -> None:
    factor = smoothing_factor(torch.tensor([act, 2.0]), torch.tensor([weight, 2.0]), alpha=0.5)
    assert factor.tolist() == pytest.approx([1.0, 1.0])


def test_nearly_dead_channels_are_bounded() -> None:
    factor = smoothing_factor(torch.tensor([1e-30, 1e30]), torch.tensor([1e10, 1e-10]), alpha=0.9)
    assert factor.tolist() == pytest.approx([1 / FACTOR_BOUND, FACTOR_BOUND])


def test_columns_of_several_weights() -> None:
    weights = [torch.tensor([[1.0, -5.0]]), torch.tensor([[-2.0, 3.0], [0.5, 0.5]])]
    assert column_absmax(weights).tolist() == [2.0, 5.0]


def stats_of(x: torch.Tensor) -> ChannelStats:
    stats = ChannelStats.empty(x.shape[1])
    stats.update(x, torch.Generator().manual_seed(0))
    return stats


def test_static_plans_cover_the_extremes() -> None:
    x = torch.tensor([[-2.0, 1.0], [6.0, 3.0]])
    symmetric = plan(stats_of(x), [torch.ones(1, 2)], static=True, alpha=None, affine=False)
    assert symmetric.scale is not None
    assert symmetric.scale.item() == pytest.approx(6 / 127)
    affine = plan(stats_of(x), [torch.ones(1, 2)], static=True, alpha=None, affine=True)
    assert affine.scale is not None
    assert affine.zero_point is not None
    assert affine.scale.item() == pytest.approx(8 / 255)
    assert affine.zero_point.item() == round(2 / (8 / 255)) - 128
    for chosen in (symmetric, affine):
        assert torch.allclose(dequantized(x, chosen), x, atol=float(chosen.scale))


@pytest.mark.parametrize("static", [True, False])
def test_search_uses_zero_points_for_one_sided_inputs(static: bool) -> None:
    torch.manual_seed(0)
    x = torch.nn.functional.gelu(torch.randn(400, 32) * 2)
    chosen = search(stats_of(x), [torch.randn(16, 32)], static=static, bits=8, may_shift=False)
    assert chosen.affine
    assert chosen.shift is None
    assert (chosen.zero_point is not None) == static


@pytest.mark.parametrize("static", [True, False])
def test_search_shifts_one_sided_channels_and_no_others(static: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(400, 32)
    x[:, 3] += 40
    x[:, 7] -= 25
    x[:, 9] += 0.5
    weights = [torch.randn(16, 32)]
    chosen = search(stats_of(x), weights, static=static, bits=8, may_shift=True)
    assert chosen.shift is not None
    assert chosen.shift.nonzero().flatten().tolist() == [3, 7]
    assert chosen.shift[[3, 7]].tolist() == pytest.approx([40, -25], abs=0.5)
    unshifted = search(stats_of(x), weights, static=static, bits=8, may_shift=False)
    assert chosen.error is not None
    assert unshifted.error is not None
    assert chosen.error < unshifted.error / 3


def test_search_is_no_worse_than_any_fixed_strength() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(300, 24) * torch.rand(24).mul(4).exp(), torch.randn(12, 24)
    exact = x @ weight.t()

    def lost(chosen: object) -> float:
        factor = chosen.factor  # type: ignore[attr-defined]
        levels, scale = quantize_weight(weight * factor, bits=8)
        output = dequantized(x, chosen) @ (levels.float() * scale[:, None]).t()  # type: ignore[arg-type]
        return float((output - exact).square().sum())

    best = lost(search(stats_of(x), [weight], static=True, bits=8, may_shift=False))
    for alpha in ALPHAS:
        fixed = plan(stats_of(x), [weight], static=True, alpha=alpha, affine=False)
        assert best <= lost(fixed) * 1.001


def test_rounding_settles_no_tie() -> None:
    """Two processes of one commit see errors that differ in their last bits and must choose alike."""
    for last_bits in (1 - 1e-6, 1 + 1e-6):
        tied = [ActivationPlan(alpha=0.5, error=2.0), ActivationPlan(alpha=0.7, error=1.0)]
        tied.append(ActivationPlan(alpha=0.8, error=1.0 * last_bits))
        assert best(tied).alpha == 0.7
    assert best([ActivationPlan(alpha=0.5, error=1.0), ActivationPlan(alpha=0.6, error=0.99)]).alpha == 0.6
    with pytest.raises(ValueError, match="no plan"):
        best([])
