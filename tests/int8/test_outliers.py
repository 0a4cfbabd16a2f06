"""The outlier analysis on models whose hidden states are known exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from int8 import outliers
from int8.errors import CalibrationError

HIDDEN, LAYERS = 8, 8


class Layer(nn.Module):
    """The linears of a post-LN layer, by BERT's names; only what they read matters here."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.key = nn.Linear(HIDDEN, HIDDEN)
        self.value = nn.Linear(HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, context: Tensor, ffn: Tensor) -> Tensor:
        self.query(x), self.key(x), self.value(x), self.out(context)
        return self.down(self.up(ffn))


class Fed(nn.Module):
    """Feeds each layer hidden states that the test makes: (layers, 3 states, B, S, H)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, 2)

    def forward(self, states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        outputs = [layer(*states[:, place].unbind(1)) for place, layer in enumerate(self.layers)]
        return self.head(torch.stack(outputs).sum(0))


def quiet(batch: int = 2, seq: int = 10) -> Tensor:
    """(B, layers, 3, S, H) values well below the threshold."""
    return torch.randn(batch, LAYERS, 3, seq, HIDDEN, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)


def model() -> Fed:
    torch.manual_seed(0)
    return Fed().eval().requires_grad_(False)


def analyse(states: Tensor, mask: Tensor | None = None, **criteria: float) -> outliers.OutlierAnalysis:
    batch = {"states": states} if mask is None else {"states": states, "attention_mask": mask}
    return outliers.analyse(model(), [batch], **criteria)


def test_what_is_looked_at() -> None:
    found = outliers.analysed_linears(model())
    assert list(found) == [f"layers.{number}" for number in range(LAYERS)]
    assert [name.rpartition(".")[2] for name in found["layers.0"]] == ["query", "key", "value", "out", "up"]
    analysis = analyse(quiet())
    assert (analysis.layers, analysis.hidden_states, analysis.hidden_size) == (LAYERS, 3 * LAYERS, HIDDEN)
    assert (analysis.sequences, analysis.tokens) == (2, 20)
    assert analysis.features == ()
    assert analysis.largest_other == pytest.approx(3.0)


def test_a_feature_is_counted_by_hand() -> None:
    """Dimension 5 is -7 in the FFN's input of two layers of eight, at every position: 2 of 24 hidden states."""
    states = quiet()
    states[:, :2, 2, :, 5] = -7.0
    analysis = analyse(states)
    (feature,) = analysis.features
    assert (feature.dimension, feature.layers, feature.layer_share) == (5, 2, 0.25)
    assert feature.position_share == pytest.approx(2 / 24)
    assert feature.values_per_sequence == 20
    assert feature.quartiles == (-7.0, -7.0, -7.0)
    assert feature.one_sided
    assert (feature.low, analysis.one_sided, analysis.values_per_sequence) == (-7.0, 1, 20)


def test_all_three_criteria_are_needed() -> None:
    below = quiet()
    below[..., 5] = 5.999
    assert analyse(below).dimensions == ()
    few_layers = quiet()
    few_layers[:, :1, :, :, 5] = 9.0  # one layer of eight, 12.5 % of positions
    assert analyse(few_layers).dimensions == ()
    few_positions = quiet()
    few_positions[:, :, :, 0, 5] = 9.0  # every layer, one position of ten ...
    few_positions[:, :, 1:, 0, 5] = 0.0  # ... in one hidden state of three: 3.3 %
    assert analyse(few_positions).dimensions == ()
    assert analyse(few_positions, min_position_share=0.03).dimensions == (5,)
    exactly = quiet()
    exactly[:, :2, :, :, 5] = 6.0
    assert analyse(exactly).dimensions == (5,)


def test_the_most_common_comes_first_and_two_sided_ones_are_told() -> None:
    states = quiet()
    states[:, :4, :, :, 3] = 8.0
    states[:, :6, :, :, 1] = 9.0
    states[:, 0, :, :, 1] = -9.0
    analysis = analyse(states)
    assert [feature.dimension for feature in analysis.features] == [1, 3]
    assert [feature.one_sided for feature in analysis.features] == [False, True]
    assert analysis.dimensions == (1, 3)


def test_quartiles_and_batches_add_up() -> None:
    states = quiet(4)
    states[..., 5] = torch.linspace(10.0, 20.0, 10)
    one = analyse(states)
    batches = [{"states": states[:1]}, {"states": states[1:]}]
    several = outliers.analyse(model(), batches)
    assert one == several
    assert one.features[0].quartiles == pytest.approx((12.5, 15.0, 17.5), abs=0.3)


def test_the_sample_of_a_feature_is_bounded_and_fair() -> None:
    states = quiet(40, 10)
    states[..., 5] = torch.linspace(10.0, 20.0, 40)[:, None, None, None]
    feature = analyse(states).features[0]
    assert feature.values_per_sequence * 40 > outliers.SAMPLE_VALUES
    assert feature.quartiles[1] == pytest.approx(15.0, abs=0.7)


def test_padding_does_not_count() -> None:
    states = quiet()
    states[..., 7:, 5] = 50.0
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[:, 7:] = 0
    assert analyse(states).dimensions == (5,)
    analysis = analyse(states, mask)
    assert (analysis.dimensions, analysis.tokens) == ((), 14)


def test_zeroing_changes_what_linears_read_and_nothing_afterwards() -> None:
    fed, states = model(), quiet()
    states[..., 5] = 9.0
    regular = fed(states=states)
    without = states.clone()
    without[..., 5] = 0.0
    with outliers.zeroed(fed, (5,)):
        altered = fed(states=states)
    assert torch.allclose(altered, fed(states=without))
    assert not torch.allclose(altered, regular)
    assert torch.equal(fed(states=states), regular)


def test_random_dimensions_leave_the_outliers_alone() -> None:
    chosen = outliers.random_dimensions(10, (2, 3, 4), 5, seed=1)
    assert len(set(chosen)) == 5
    assert not set(chosen) & {2, 3, 4}
    assert (
        chosen
        == outliers.random_dimensions(10, (2, 3, 4), 5, seed=1)
        != outliers.random_dimensions(10, (2, 3, 4), 5, seed=2)
    )
    assert outliers.random_dimensions(3, (0, 1), 5, seed=1) == (2,)


class Attending(nn.Module):
    """One layer of attention on given hidden states, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.layers[0](x, x, x)


def test_attention_mass_against_transformers_arithmetic() -> None:
    torch.manual_seed(3)
    attending = Attending().eval().requires_grad_(False)
    layer = attending.layers[0]
    x = torch.randn(2, 5, HIDDEN)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])

    def mass(y: Tensor, causal: bool) -> float:
        tops = []
        for row, length in ((0, 5), (1, 3)):
            for head in (slice(0, 4), slice(4, 8)):
                scores = layer.query(y[row])[:, head] @ layer.key(y[row])[:, head].t() / 2.0
                scores = scores[:length, :length]
                if causal:
                    scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -1e9)
                tops.append(scores.softmax(-1).amax(-1))
        return float(torch.cat(tops).mean())

    zeroed = x.index_fill(-1, torch.tensor([2]), 0.0)
    for causal in (False, True):
        batches = [{"x": x, "attention_mask": mask}]
        found = outliers.attention_mass(attending, batches, [(), (2,)], heads=2, causal=causal)
        assert found == pytest.approx((mass(x, causal), mass(zeroed, causal)), abs=1e-6)


def test_models_that_cannot_be_analysed_are_told() -> None:
    with pytest.raises(CalibrationError, match="numbered layer"):
        outliers.analyse(nn.Sequential().eval(), [])
    with pytest.raises(CalibrationError, match="no real token"):
        outliers.analyse(model(), [])
    with pytest.raises(CalibrationError, match="query"):
        outliers.attention_mass(nn.ModuleList([nn.Linear(2, 2)]), [], [()], heads=1)
