from __future__ import annotations

import pytest
import torch

from int8.smooth import FACTOR_BOUND, column_absmax, smoothing_factor


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
