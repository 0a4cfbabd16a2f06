from __future__ import annotations

import resource

import pytest
import torch
from small_encoders import Encoder, make_batch
from torch import nn

from int8.calibrate import SAMPLE_ROWS, ChannelStats, collect
from int8.errors import CalibrationError
from int8.quantization import find_linears


def linears_of(model: nn.Module) -> dict[str, nn.Linear]:
    return find_linears(model)


def test_ragged_batches_equal_their_concatenation(encoder: Encoder) -> None:
    ragged = [make_batch(4, 16, seed=1), make_batch(4, 9, seed=2)]
    seen = collect(encoder, linears_of(encoder), ragged)
    rows: list[torch.Tensor] = []
    handle = encoder.layers[1].up.register_forward_pre_hook(lambda module, args: rows.append(args[0].reshape(-1, 32)))
    for batch in ragged:
        encoder(**batch)
    handle.remove()
    stats = seen.stats["layers.1.up"]
    assert stats.rows == 4 * 16 + 4 * 9
    assert torch.equal(stats.low, torch.cat(rows).amin(dim=0))
    assert torch.equal(stats.high, torch.cat(rows).amax(dim=0))


def test_padding_is_left_out(encoder: Encoder) -> None:
    batch = make_batch(2, 10, pads=4)
    plain = {name: value[:, :6] for name, value in batch.items()}
    with_pads, without = (collect(encoder, linears_of(encoder), [b]) for b in (batch, plain))
    for name, stats in without.stats.items():
        assert torch.equal(with_pads.stats[name].absmax, stats.absmax)
        assert with_pads.stats[name].rows == stats.rows == 12


class Poison(nn.Module):
    """Passes its input on, with a value planted at a position."""

    def __init__(self, position: int, value: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.position, self.value = position, value

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = torch.ones(*input_ids.shape, 4)
        x[:, self.position] = self.value
        return self.layers[0](x)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_values_count_only_in_real_tokens(value: float) -> None:
    batch = make_batch(2, 8, pads=2)
    padded = Poison(7, value).eval()
    assert collect(padded, linears_of(padded), [batch]).stats["layers.0"].absmax.tolist() == [1.0] * 4
    real = Poison(0, value).eval()
    with pytest.raises(CalibrationError, match=r"layers\.0.*real"):
        collect(real, linears_of(real), [batch])


def test_no_batch_is_an_error(encoder: Encoder) -> None:
    exhausted = iter([make_batch(1, 4)])
    next(exhausted)
    for nothing in ([], exhausted):
        with pytest.raises(CalibrationError, match="saw no batch"):
            collect(encoder, linears_of(encoder), nothing)


def test_an_all_zero_mask_is_an_error(encoder: Encoder) -> None:
    with pytest.raises(CalibrationError, match="attention_mask"):
        collect(encoder, linears_of(encoder), [make_batch(2, 4, pads=4)])


def test_a_batch_that_is_no_dict_is_an_error(encoder: Encoder) -> None:
    with pytest.raises(CalibrationError, match="give dicts"):
        collect(encoder, linears_of(encoder), [torch.zeros(1, 2)])  # type: ignore[list-item]


def test_linears_that_never_ran_are_listed(encoder: Encoder) -> None:
    encoder.layers.append(nn.Linear(32, 32))  # in the list of layers, never called by name
    encoder.forward = lambda input_ids, attention_mask: encoder.layers[0](encoder.embed(input_ids))  # type: ignore
    seen = collect(encoder, linears_of(encoder), [make_batch(1, 4)])
    assert set(seen.never_ran) == {"layers.1.up", "layers.1.down", "layers.2"}


def test_hooks_are_gone_afterwards(encoder: Encoder) -> None:
    collect(encoder, linears_of(encoder), [make_batch(1, 4)])
    with pytest.raises(CalibrationError):
        collect(encoder, linears_of(encoder), [])
    assert not any(module._forward_pre_hooks for module in encoder.modules())


def test_linears_with_one_input_share_their_statistics() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value, out = self.layers
            return out(query(x) + key(x) + value(x))

    model = Attention().eval()
    seen = collect(model, linears_of(model), [{"x": torch.ones(2, 4)}, {"x": torch.ones(3, 4)}]).stats
    assert seen["layers.0"] is seen["layers.1"] is seen["layers.2"] is not seen["layers.3"]
    assert seen["layers.0"].rows == 5


def test_sample_is_bounded_and_uniform() -> None:
    stats, generator = ChannelStats.empty(1), torch.Generator().manual_seed(0)
    total = 20 * SAMPLE_ROWS
    for start in range(0, total, 100):
        stats.update(torch.arange(start, min(start + 100, total), dtype=torch.float32)[:, None], generator)
    assert stats.sample.shape == (SAMPLE_ROWS, 1)
    assert len(set(stats.sample.flatten().tolist())) == SAMPLE_ROWS
    # The mean of a uniform sample of 0..total-1 lies within 5 standard errors of the middle.
    assert abs(float(stats.sample.mean()) - total / 2) < 5 * total / (12 * SAMPLE_ROWS) ** 0.5


def test_memory_does_not_grow_with_tokens() -> None:
    encoder = Encoder(width=256, inner=256, layers=1).eval()
    names = linears_of(encoder)
    batches = (make_batch(16, 128, seed=seed) for seed in range(60))
    after_ten: list[int] = []

    def note(done: int) -> None:
        if done == 10:
            after_ten.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    collect(encoder, names, batches, progress=note)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - after_ten[0]
    assert grown < 30_000  # KiB; keeping the inputs of 50 batches would take 200,000
