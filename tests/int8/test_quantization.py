from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from small_encoders import Encoder, make_batch, sqnr_db
from torch import nn
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8StaticActivationInt8WeightConfig,
    PerRow,
    PerTensor,
    quantize_,
)

import int8
from int8 import quantization
from int8.errors import CalibrationError, QuantizationError
from int8.recipe import Recipe
from int8.tensor import Int8Weight

QUANTIZED = ("static", "dynamic", "sq-static", "sq-dynamic")
Batches = list[dict[str, torch.Tensor]]


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_quantized_outputs_stay_close(encoder: Encoder, calibration: Batches, recipe: str) -> None:
    quantized = int8.quantize(encoder, recipe, calibration, isa="native")
    batch = calibration[0]
    assert sqnr_db(encoder(**batch), quantized(**batch)) > 25


def test_encoder_linears_are_quantized_and_heads_left(encoder: Encoder, calibration: Batches) -> None:
    quantized = int8.quantize(encoder, "sq-static", calibration)
    assert sorted(int8.quantized_modules(quantized)) == [
        "layers.0.down",
        "layers.0.up",
        "layers.1.down",
        "layers.1.up",
    ]
    assert not isinstance(quantized.head.weight, Int8Weight)


def test_the_callers_model_is_not_touched(encoder: Encoder, calibration: Batches) -> None:
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    int8.quantize(encoder, "sq-static", calibration)
    assert all(torch.equal(before[name], value) for name, value in encoder.state_dict().items())
    assert not int8.quantized_modules(encoder)


def test_a_model_without_linears_is_an_error() -> None:
    with pytest.raises(QuantizationError, match="0 linears"):
        int8.quantize(nn.Sequential(nn.Conv1d(4, 4, 1)).eval(), "dynamic")


def test_linears_outside_layers_need_a_filter() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.only(x)

    with pytest.raises(QuantizationError, match="accept="):
        int8.quantize(Flat().eval(), "dynamic")
    assert len(int8.quantized_modules(int8.quantize(Flat().eval(), "dynamic", accept=lambda name, module: True))) == 1


def test_recipes_that_need_calibration_say_so(encoder: Encoder) -> None:
    for recipe in ("static", "sq-static", "sq-dynamic"):
        with pytest.raises(CalibrationError, match="needs calibration"):
            int8.quantize(encoder, recipe)
    assert int8.quantized_modules(int8.quantize(encoder, "dynamic"))


def test_float_recipes_and_training_mode_are_refused(encoder: Encoder) -> None:
    with pytest.raises(QuantizationError, match=r"int8\.compile"):
        int8.quantize(encoder, "fp32")
    with pytest.raises(QuantizationError, match="eval"):
        int8.quantize(encoder.train(), "dynamic")


def test_unused_linears_stay_in_floating_point(encoder: Encoder, calibration: Batches) -> None:
    encoder.layers[1].spare = nn.Linear(32, 32)
    quantized = int8.quantize(encoder, "sq-static", calibration)
    assert "layers.1.spare" not in int8.quantized_modules(quantized)
    assert sqnr_db(encoder(**calibration[0]), quantized(**calibration[0])) > 25


def test_dead_channels_on_both_sides(encoder: Encoder, calibration: Batches) -> None:
    with torch.no_grad():
        encoder.layers[0].up.weight[:, 3] = 0
        encoder.embed.weight[:, 5] = 0
        encoder.layers[0].up.weight[:, 5] = 0
        encoder.layers[0].up.weight[7] = 0
    for recipe in ("sq-static", "sq-dynamic"):
        quantized = int8.quantize(encoder, recipe, calibration)
        result = quantized(**calibration[0])
        assert bool(torch.isfinite(result).all())
        assert sqnr_db(encoder(**calibration[0]), result) > 25


def test_smoothing_tames_an_outlier_channel() -> None:
    """Per-tensor static quantization is ruined by one wide channel; smoothing gives most of it back."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32)).eval()
    x = torch.randn(256, 64)
    x[:, 2] *= 60
    with torch.no_grad():
        model[0].weight[:, 2] /= 60
    # A Sequential takes no keyword arguments, so calibration goes through a named one.
    plain, smooth = (sqnr_db(model(x), int8.quantize(Named(model), r, [{"x": x}])(x)) for r in ("static", "sq-static"))
    assert plain < 20
    assert smooth > plain + 10


class Named(nn.Module):
    """Calls its only layer with a keyword argument."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize(("isa", "bits", "limit"), [("avx2", 7, 63), ("avx512", 7, 63), ("vnni", 8, 127)])
def test_weights_keep_to_the_range_of_their_isa(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch, isa: str, bits: int, limit: int
) -> None:
    monkeypatch.setattr("int8.isa.why_unsupported", lambda name: None)
    quantized = int8.quantize(encoder, "dynamic", isa=isa)
    weights = [module.weight for module in int8.quantized_modules(quantized).values()]
    assert all(weight.bits == bits and weight.qdata.abs().max() == limit for weight in weights)


def test_labels_follow_the_shape_of_the_scales(encoder: Encoder, calibration: Batches) -> None:
    static = int8.quantize(encoder, "sq-static", calibration).layers[0].up.weight
    dynamic = int8.quantize(encoder, "sq-dynamic", calibration).layers[0].up.weight
    assert (static.dynamic, static.act_quant_scale.numel()) == (False, 1)
    assert (dynamic.dynamic, dynamic.act_quant_scale) == (True, None)
    assert static.scale.numel() == dynamic.scale.numel() == 48


def test_static_models_take_other_batch_sizes_and_ranks(encoder: Encoder, calibration: Batches) -> None:
    quantized = int8.quantize(encoder, "sq-static", calibration)
    one = quantized(**make_batch(1, 5, seed=4))
    assert torch.allclose(one[0], quantized(input_ids=make_batch(1, 5, seed=4)["input_ids"][0]), atol=1e-5)


def test_explicit_recipe_objects_work(encoder: Encoder, calibration: Batches) -> None:
    recipe = Recipe("mine", "static", smoothing=True, alpha=0.3, weight_bits=7)
    quantized = int8.quantize(encoder, recipe, calibration)
    assert quantized.layers[0].up.weight.bits == 7
    assert quantized.int8_recipe == recipe


def test_reachable_as_a_config_of_torchao(encoder: Encoder, calibration: Batches) -> None:
    model = copy.deepcopy(encoder)
    quantize_(model, int8.SmoothQuant.prepared(model, "sq-static", calibration))
    expected = int8.quantize(encoder, "sq-static", calibration)
    assert set(int8.quantized_modules(model)) == set(int8.quantized_modules(expected))
    assert torch.equal(model(**calibration[0]), expected(**calibration[0]))


def torchao_static(model: nn.Module) -> None:
    scale = torch.tensor([[0.05]])
    quantize_(model, Int8StaticActivationInt8WeightConfig(act_quant_scale=scale, granularity=[PerTensor(), PerRow()]))


def torchao_dynamic(model: nn.Module) -> None:
    quantize_(model, Int8DynamicActivationInt8WeightConfig())


@pytest.mark.parametrize("make", [torchao_static, torchao_dynamic])
def test_torchaos_own_tensors_can_be_taken_over(make: Callable[[nn.Module], None]) -> None:
    linear = nn.Sequential(nn.Linear(32, 16)).eval()
    x = torch.randn(4, 32)
    make(linear)
    theirs = linear[0].weight
    ours = Int8Weight.from_torchao(theirs)
    levels, scale = (x / 0.05, 0.05) if make is torchao_static else (x, 1.0)
    expected = nn.functional.linear(levels * scale, theirs.dequantize(), linear[0].bias)
    assert sqnr_db(expected, nn.functional.linear(x, ours, linear[0].bias)) > 30
    assert torch.equal(ours.to_torchao().qdata, theirs.qdata)


def test_torchaos_weights_that_could_overflow_are_refused() -> None:
    """255 x 128 x 65,794 does not fit the accumulator, whoever quantized the weight."""
    linear = nn.Sequential(nn.Linear(65_794, 1)).eval()
    torchao_dynamic(linear)
    with pytest.raises(QuantizationError, match="overflow"):
        Int8Weight.from_torchao(linear[0].weight)


def test_scales_tied_to_the_calibration_rows_are_refused() -> None:
    weight = Int8Weight.from_float(torch.randn(4, 8), bits=8, act_scale=torch.tensor(0.1)).to_torchao()
    weight.act_quant_scale = torch.full((6, 1), 0.1)
    with pytest.raises(QuantizationError, match="PerTensor"):
        Int8Weight.from_torchao(weight)


def test_progress_is_reported(encoder: Encoder, calibration: Batches) -> None:
    done: list[int] = []
    int8.quantize(encoder, "sq-static", calibration, progress=done.append)
    assert done == [1, 2]


@pytest.mark.parametrize("recipe", [*QUANTIZED, "llm-int8-offline"])
def test_statistics_gathered_once_serve_every_recipe(encoder: Encoder, calibration: Batches, recipe: str) -> None:
    seen = quantization.statistics(encoder, calibration)
    shared, fresh = int8.quantize(encoder, recipe, seen), int8.quantize(encoder, recipe, calibration)
    assert torch.equal(shared(**calibration[0]), fresh(**calibration[0]))


def test_statistics_of_another_model_are_refused(encoder: Encoder, calibration: Batches) -> None:
    seen = quantization.statistics(Encoder(layers=1).eval(), calibration)
    with pytest.raises(CalibrationError, match=r"layers\.1\.up"):
        int8.quantize(encoder, "sq-static", seen)


def test_static_scales_reach_the_largest_value_of_a_heavy_tail(encoder: Encoder, calibration: Batches) -> None:
    """Clipping at a percentile keeps most tokens finer and ruins an encoder whose few large channels matter."""
    with torch.no_grad():
        encoder.layers[0].norm.weight[:6] *= 60.0
    quantized = int8.quantize(encoder, "static", calibration)
    seen = quantization.statistics(encoder, calibration)
    scale = dict(quantized.named_modules())["layers.1.up"].weight.act_quant_scale
    assert float(scale * 127) == pytest.approx(float(seen.stats["layers.1.up"].absmax.amax()), rel=1e-5)
