from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from small_encoders import Encoder, make_batch, sqnr_db

import int8
from int8 import quantization, recipe, sensitivity
from int8.errors import CalibrationError

Batches = list[dict[str, torch.Tensor]]


def measured(encoder: Encoder, calibration: Batches, name: str = "sq-static") -> sensitivity.Sensitivity:
    linears = quantization.find_linears(encoder)
    seen = quantization.statistics(encoder, calibration)
    weights = quantization.quantized_weights(linears, recipe.get(name), seen, isa="vnni")
    return sensitivity.measure(encoder, name, weights, seen, calibration)


def test_every_group_is_rated_alone_and_left_out(encoder: Encoder, calibration: Batches) -> None:
    found = measured(encoder, calibration)
    assert [group.linears for group in found.groups] == [
        ("layers.0.up",),
        ("layers.0.down",),
        ("layers.1.up",),
        ("layers.1.down",),
    ]
    assert found.sequences == 7
    assert sum(group.noise_share for group in found.groups) == pytest.approx(1.0)
    for group in found.groups:
        assert group.alone_db > found.total_db
        assert group.without_db > found.total_db
    # Errors of different groups are all but independent: one by one they add up to that of all, within a few dB.
    added = -10 * math.log10(sum(10 ** (-group.alone_db / 10) for group in found.groups))
    assert added == pytest.approx(found.total_db, abs=3.0)


def test_a_damaged_group_stands_out(encoder: Encoder, calibration: Batches) -> None:
    with torch.no_grad():
        encoder.layers[0].norm.bias[3] = 60.0  # one channel takes all of the range of what layers.1.up reads
    worst = min(measured(encoder, calibration, "static").groups, key=lambda group: group.alone_db)
    assert worst.linears == ("layers.1.up",)


def test_the_total_is_that_of_the_quantized_model_and_the_model_is_not_touched(
    encoder: Encoder, calibration: Batches
) -> None:
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    found = measured(encoder, calibration[:1])
    quantized = int8.quantize(encoder, recipe.get("sq-static").replace(weight_bits=8), calibration[:1])
    mask = calibration[0]["attention_mask"].bool()
    outputs = [one(**calibration[0])[mask] for one in (encoder, quantized)]
    assert found.total_db == pytest.approx(sqnr_db(*outputs), abs=0.01)
    assert all(torch.equal(before[name], value) for name, value in encoder.state_dict().items())
    assert not int8.quantized_modules(encoder)


def test_linears_that_share_an_input_are_one_group_with_a_readable_name() -> None:
    names = ("encoder.layer.0.attention.self.query", "encoder.layer.0.attention.self.key")
    assert sensitivity.group_name(names) == "encoder.layer.0.attention.self.(query key)"
    assert sensitivity.group_name(("layers.0.up",)) == "layers.0.up"


def test_hidden_states_are_pooled_over_real_tokens_and_logits_kept() -> None:
    batch = make_batch(2, 4, pads=2)
    hidden = torch.randn(2, 4, 32)
    pooled = sensitivity.compared_output(SimpleNamespace(last_hidden_state=hidden), batch)
    assert torch.allclose(pooled, hidden[:, :2].mean(dim=1), atol=1e-6)
    logits = torch.randn(2, 4, 2)
    assert torch.equal(sensitivity.compared_output(logits, batch), logits[:, :2].reshape(4, 2))
    classes = torch.randn(2, 3)
    assert torch.equal(sensitivity.compared_output(SimpleNamespace(logits=classes), batch), classes)


def test_bad_data_is_said(encoder: Encoder, calibration: Batches) -> None:
    with pytest.raises(CalibrationError, match="no batch"):
        sensitivity.Trial(encoder, [])
    with pytest.raises(CalibrationError, match="wrap it"):
        sensitivity.compared_output("text", calibration[0])
    with torch.no_grad():
        encoder.embed.weight.fill_(float("nan"))
    with pytest.raises(CalibrationError, match="NaN"):
        sensitivity.Trial(encoder, calibration)


def test_ratios_at_their_ends() -> None:
    assert sensitivity.sqnr_db(100.0, 1.0) == pytest.approx(20.0)
    assert sensitivity.sqnr_db(1.0, 0.0) == math.inf
    assert sensitivity.sqnr_db(0.0, 1.0) == -math.inf
    assert sensitivity.sqnr_db(1.0, math.inf) == -math.inf
