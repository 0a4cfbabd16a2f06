"""LLM.int8() and the schemes it is compared with: against hand-computed values, their definitions, and compiled."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import int8
from int8 import evidence, isa, ops, recipe, saving
from int8.errors import ArtifactError, CalibrationError, QuantizationError, RecipeError
from int8.recipe import Recipe
from int8.schemes import absmax, build_weight, llm_int8, rowwise, vectorwise, zeropoint
from int8.schemes.llm_int8 import DecomposedWeight
from int8.tensor import Int8Weight, weight_levels

SCHEMES = ("absmax", "zeropoint", "rowwise", "vectorwise", "llm-int8", "llm-int8-offline")
DEFINITIONS = {
    "absmax": absmax.linear,
    "zeropoint": zeropoint.linear,
    "rowwise": rowwise.linear,
    "vectorwise": vectorwise.linear,
    "llm-int8": lambda x, w, b, levels: llm_int8.linear(x, w, b, weight_levels=levels),
}


class Pair(nn.Module):
    """Two linears that read one tensor, with and without a bias; sizes that no vector divides."""

    def __init__(self, inner: int = 30) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(inner, 21), nn.Linear(inner, 5, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers], dim=-1)


def activations(*shape: int, outliers: tuple[int, ...] = (), seed: int = 0) -> Tensor:
    """Normal values well below 6, with one-sided outlier dimensions as trained models have them."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).clamp(-4, 4)
    for place, dimension in enumerate(outliers):
        x[..., dimension] += (-1) ** place * (12.0 + 5 * place)
    return x


def pair(inner: int = 30) -> Pair:
    torch.manual_seed(1)
    return Pair(inner).eval().requires_grad_(False)


def quantized(name: str | Recipe, model: nn.Module, x: Tensor) -> nn.Module:
    return int8.quantize(model, name, [{"x": x}])


# The formulas, computed by hand


def test_absmax_by_hand() -> None:
    levels, scale = absmax.quantize(torch.tensor([[1.0, -2.0], [0.5, 4.0]]))
    assert scale == 31.75
    assert levels.tolist() == [[32, -64, 16, 127][:2], [16, 127]]  # 31.75, -63.5 to even, 15.875, 127
    result = absmax.linear(torch.tensor([[1.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.5, -1.0]]))
    assert torch.allclose(result, torch.tensor([[32 * 127.0, 32 * 64 - 127 * 127.0]]).double() / (31.75 * 127))


def test_zeropoint_by_hand() -> None:
    """nd = 254 / 4 = 63.5, zp = round(-63.5) + 127 = 63."""
    levels, dynamic_range, zero = zeropoint.quantize(torch.tensor([-1.0, 0.0, 1.0, 3.0]))
    assert (float(dynamic_range), float(zero)) == (63.5, 63.0)
    assert levels.tolist() == [-127, -63, 1, 127]  # round(-63.5) = -64, round(63.5) = 64, round(190.5) = 190
    ours, scale, ours_zero = ops.quantize_affine(torch.tensor([-1.0, 0.0, 1.0, 3.0]), 127)
    assert ours.tolist() == levels.tolist()
    assert (int(ours_zero), float(scale)) == (-63, pytest.approx(1 / 63.5))


def test_zeropoint_of_one_sided_values_uses_the_whole_range() -> None:
    levels, _, _ = ops.quantize_affine(torch.linspace(10.0, 20.0, 255), 127)
    assert levels.tolist() == list(range(-127, 128))
    narrow, _, _ = ops.quantize_affine(torch.linspace(10.0, 20.0, 255), 63)
    assert (int(narrow.min()), int(narrow.max())) == (-63, 63)


def test_rowwise_and_vectorwise_by_hand() -> None:
    levels, scale = rowwise.quantize_rows(torch.tensor([[1.0, -2.0], [100.0, 25.0]]))
    assert scale.reshape(-1).tolist() == [63.5, pytest.approx(1.27)]
    assert levels.tolist() == [[64, -127], [127, 32]]  # 63.5 to even, 31.75
    weight = torch.tensor([[2.0, 1.0], [0.0, 0.5]])
    x = torch.tensor([[1.0, -2.0]])
    by_row = rowwise.linear(x, weight)  # one weight scale, 63.5: levels 127, 64 (63.5) and 0, 32 (31.75)
    assert torch.allclose(by_row, torch.tensor([[64 * 127 - 127 * 64.0, -127 * 32.0]]).double() / (63.5 * 63.5))
    by_vector = vectorwise.linear(x, weight)  # scales 63.5 and 254: levels 127, 64 and 0, 127
    expected = torch.tensor([[(64 * 127 - 127 * 64.0) / 63.5, -127 * 127.0 / 254]]).double() / 63.5
    assert torch.allclose(by_vector, expected)


def test_decomposition_by_hand() -> None:
    """Dimension 1 reaches 6 in one token, so it is exact for every token; the rest has a range of its own."""
    x = torch.tensor([[1.0, 6.0, -2.0], [0.5, 0.125, 1.0]])
    weight = torch.tensor([[1.0, 0.3, 0.5]])
    result = llm_int8.linear(x, weight)
    first = 6.0 * 0.3 + (64 * 127 + -127 * 64) / (63.5 * 127)  # levels 63.5 -> 64, -127; weights 127, 63.5 -> 64
    second = 0.125 * 0.3 + (64 * 127 + 127 * 64) / (127 * 127)
    assert torch.allclose(result, torch.tensor([[first], [second]]).double(), atol=1e-6)
    assert torch.allclose(llm_int8.linear(x, weight, threshold=6.5), vectorwise.linear(x, weight))


# The operators against the definitions


@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 30, 3), (7, 33, 5), (2, 3, 770, 4)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_operators_compute_the_definitions(name: str, shape: tuple[int, ...], with_bias: bool) -> None:
    *rows, inner, outer = shape
    x = activations(*rows, inner, outliers=(inner // 2,) if inner > 1 else (), seed=3)
    if inner == 1 and name == "zeropoint":
        pytest.skip("a single value has no range; see the test of constant tensors")
    weight = torch.randn(outer, inner, generator=torch.Generator().manual_seed(4))
    bias = torch.randn(outer) if with_bias else None
    for bits in (7, 8):
        built = build_weight(weight, recipe.get(name), bits, isa="avx2")  # type: ignore[arg-type]
        expected = DEFINITIONS[name](x, weight, bias, weight_levels(bits))
        error = (linear(x, built, bias) - expected).abs()
        # Scales rounded to FP32 may move a tie to the next level: rarely, and by no more than that.
        assert error.median() < 1e-4
        assert error.max() < x.abs().max() * weight.abs().max() / weight_levels(bits) * 1.01


@pytest.mark.parametrize("value", [0.0, 3.5, -1e-8, 1e6])
def test_constant_tensors_have_a_zero_point(value: float) -> None:
    x = torch.full((2, 9), value)
    levels, scale, zero = ops.quantize_affine(x, 127)
    assert abs(int(zero)) <= ops.MAX_ZERO_POINT
    assert torch.allclose((levels.int() - zero) * scale, x, rtol=1e-4, atol=0)
    weight = torch.randn(4, 9)
    built = Int8Weight.from_float_affine(weight, bits=8)
    assert torch.allclose(linear(x, built), linear(x, built.dequantize()), rtol=1e-3, atol=abs(value) * 1e-3)


def test_zero_point_terms_are_exact() -> None:
    """Levels of affine operands, multiplied as integers after their zero points are taken off."""
    x, weight = activations(5, 33) + 3, torch.rand(4, 33) - 0.2
    built = Int8Weight.from_float_affine(weight, bits=8)
    levels, scale, zero = ops.quantize_affine(x, 127)
    integers = (levels.long() - zero) @ (built.qdata.long() - built.zero_point.reshape(())).t()
    expected = integers.double().float() * (scale * built.scale.reshape(()))
    assert torch.equal(linear(x, built), expected)


@pytest.mark.parametrize("name", SCHEMES)
def test_zero_tokens_and_zero_rows_give_zero(name: str) -> None:
    weight = torch.randn(4, 12)
    weight[2] = 0
    built = build_weight(weight, recipe.get(name), 8, isa="avx2", act_absmax=torch.ones(12))
    result = linear(torch.zeros(3, 12), built)
    assert result.abs().max() == 0
    x = activations(3, 12)
    x[1] = 0
    result = linear(x, built)
    assert bool(torch.isfinite(result).all())
    if name != "zeropoint":  # there zero is a level only up to rounding
        assert result[1].abs().max() == 0
        assert result[:, 2].abs().max() == 0


def test_vectorwise_is_dynamic() -> None:
    model, x = pair(), activations(3, 30)
    first, second = quantized("vectorwise", model, x), quantized("dynamic", model, x)
    assert torch.equal(first(x), second(x))
    assert recipe.get("vectorwise").replace(name="dynamic") == recipe.get("dynamic")


# Decomposition


@pytest.mark.parametrize("weights", ["float", "dequantized"])
@pytest.mark.parametrize("offline", [False, True])
def test_no_outlier_equals_vectorwise_bit_for_bit(weights: str, offline: bool) -> None:
    model, x = pair(), activations(4, 6, 30)
    chosen = recipe.get("llm-int8").replace(outlier_weights=weights, outliers_from_calibration=offline)
    assert torch.equal(quantized(chosen, model, x)(x), quantized("vectorwise", model, x)(x))


@pytest.mark.parametrize("offline", [False, True])
def test_all_outliers_equal_the_float_product(offline: bool) -> None:
    model, x = pair(), activations(4, 6, 30)
    chosen = recipe.get("llm-int8").replace(outlier_threshold=0.0, outliers_from_calibration=offline)
    assert torch.allclose(quantized(chosen, model, x)(x), model(x), atol=1e-6)


def test_all_outliers_equal_the_16_bit_product_where_bf16_is_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("int8.isa.why_unsupported", lambda name: None)
    monkeypatch.setattr("int8.isa.effective", lambda: "amx")
    model, x = pair(), activations(4, 6, 30)
    chosen = recipe.get("llm-int8").replace(outlier_threshold=0.0)
    result = int8.quantize(model, chosen, isa="amx")
    assert result.layers[0].weight.outlier_weight.dtype == torch.bfloat16
    expected = linear(x.bfloat16(), model.layers[1].weight.bfloat16()).float()
    assert torch.equal(result(x)[..., 21:], expected)


def test_dequantized_outliers_need_no_copy_and_are_less_exact() -> None:
    model, x = pair(), activations(4, 6, 30, outliers=(3, 17))
    kept = quantized("llm-int8", model, x)
    spare = quantized(recipe.get("llm-int8").replace(outlier_weights="dequantized"), model, x)
    assert spare.layers[0].weight.outlier_weight is None
    error = [(m(x) - model(x)).norm() for m in (kept, spare, quantized("vectorwise", model, x))]
    assert error[0] < error[1] < error[2]


def test_the_threshold_belongs_to_the_outliers() -> None:
    x = torch.tensor([[6.0, 5.999, -6.0, 0.0], [0.0, 0.0, 0.0, -7.0]])
    assert ops.outlier_dimensions(x, 6.0).tolist() == [True, False, True, True]


def test_fixed_outliers_come_from_calibration() -> None:
    model, seen = pair(), activations(4, 6, 30, outliers=(3, 17))
    fixed = quantized("llm-int8-offline", model, seen)
    weight = fixed.layers[0].weight
    assert isinstance(weight, DecomposedWeight)
    assert weight.outlier_index.tolist() == [3, 17]
    assert weight.outlier_weight.shape == (21, 2)
    assert weight.qdata[:, [3, 17]].abs().max() == 0
    online = quantized("llm-int8", model, seen)
    assert torch.allclose(fixed(seen), online(seen), atol=0.1)
    surprise = activations(4, 6, 30, outliers=(8,))  # an outlier that calibration never saw stays in INT8
    assert (fixed(surprise) - model(surprise)).norm() > (online(surprise) - model(surprise)).norm()
    with pytest.raises(CalibrationError, match="calibration data"):
        int8.quantize(model, "llm-int8-offline")


def test_infinite_outliers_stay_out_of_the_scale() -> None:
    model, x = pair(), activations(2, 30)
    x[0, 4] = float("inf")
    result = quantized("llm-int8", model, activations(2, 30))(x)
    assert not bool(torch.isfinite(result[0]).any())
    assert torch.allclose(result[1], model(x)[1], atol=0.1)


# Compiled


@pytest.mark.parametrize("name", SCHEMES)
def test_compiled_equals_the_reference_and_is_fused(name: str) -> None:
    model = pair()
    x = activations(3, 5, 30, outliers=(3, 17))
    x[1, 2] = 0
    eager = quantized(name, model, x)
    compiled = int8.compile(eager, dynamic=False)
    for batch in (x, activations(1, 30, outliers=(9,), seed=7)):
        assert torch.allclose(compiled(batch), eager(batch), rtol=1e-5, atol=2e-5)
    assert [(report.graphs, report.calls, report.fused_calls) for report in compiled.reports] == [(1, 2, 2)] * 2
    found = evidence.collect(eager, compiled, {"x": x})
    assert (found.linears, found.quantized_linears, found.fused_linears) == (2, 2, 2)
    assert sum(found.kernels.values()) >= 2
    assert not any("ref" in kernel for kernel in found.kernels)


def test_compiled_identities() -> None:
    model, x = pair(), activations(4, 30)
    results = [int8.compile(quantized(name, model, x), dynamic=False)(x) for name in ("vectorwise", "llm-int8")]
    assert torch.equal(*results)
    everything = recipe.get("llm-int8").replace(outlier_threshold=0.0)
    assert torch.allclose(int8.compile(quantized(everything, model, x), dynamic=False)(x), model(x), atol=1e-6)


@pytest.mark.parametrize("offline", [False, True])
def test_dequantized_outliers_compile(offline: bool) -> None:
    model, x = pair(), activations(4, 30, outliers=(3, 17))
    changes = {"outlier_weights": "dequantized", "outliers_from_calibration": offline}
    eager = quantized(recipe.get("llm-int8").replace(**changes), model, x)
    compiled = int8.compile(eager, dynamic=False)
    assert torch.allclose(compiled(x), eager(x), rtol=1e-5, atol=2e-5)
    assert compiled.fused_linears == 2


@pytest.mark.parametrize("name", ["zeropoint", "absmax"])
def test_levels_at_the_ends_of_their_ranges_do_not_saturate(name: str) -> None:
    model = nn.Sequential(nn.Linear(64, 16)).eval().requires_grad_(False)
    model[0].weight.fill_(1.0)
    model[0].weight[1::2] = -1.0
    x = torch.ones(4, 64)
    x[1] = -1.0
    eager = int8.quantize(model, name)
    assert torch.allclose(int8.compile(eager, dynamic=False)(x), eager(x), rtol=1e-5, atol=1e-4)
    assert torch.allclose(eager(x), model(x), rtol=0.02, atol=0.02)


def test_dynamic_shapes_compile() -> None:
    model = pair()
    eager = quantized("llm-int8", model, activations(2, 30))
    compiled = int8.compile(eager, dynamic=True)
    for rows in (3, 5):
        x = activations(rows, 30, outliers=(4,), seed=rows)
        assert torch.allclose(compiled(x), eager(x), rtol=1e-5, atol=2e-5)
    assert len(compiled.reports) == 1


@pytest.mark.parametrize("name", ["zeropoint", "llm-int8"])
def test_signed_activations_and_bf16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lowered for AMX, computed here by oneDNN's reference kernel and emulated BF16."""
    monkeypatch.setattr("int8.isa.effective", lambda: "amx")
    model, x = pair(), activations(3, 30, outliers=(3,))
    eager = quantized(recipe.get(name).replace(weight_bits=7), model, x)
    compiled = int8.compile(eager, dynamic=False)
    error = (compiled(x).float() - eager(x)).norm() / eager(x).norm()
    assert error < 0.02
    assert compiled.fused_linears == 2


# Fake tensors, recipes, files


def test_fake_outputs_match_the_real_ones() -> None:
    x, weight, tests = torch.randn(2, 4, 8), torch.randn(3, 8), ("test_schema", "test_faketensor")
    for name in ("absmax", "zeropoint", "llm-int8"):
        call = build_weight(weight, recipe.get(name), 8, isa="avx2").linear_call()
        arguments = {**call.tensors, **call.constants, "bias": None, "out_dtype": torch.float32}
        torch.library.opcheck(call.operator.default, (x,), arguments, test_utils=tests)
    mask = torch.tensor([True] * 3 + [False] * 5)
    operands = (x, mask, None, weight.to(torch.int8), torch.ones(3), torch.float32)
    torch.library.opcheck(torch.ops.int8.outlier_product.default, operands, test_utils=tests)


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "static", "outlier_threshold": 6.0},
        {"smoothing": True, "alpha": 0.5, "outlier_threshold": 6.0},
        {"asymmetric": True},
        {"act_granularity": "tensor"},
        {"weight_granularity": "tensor", "outlier_threshold": 6.0},
        {"outlier_threshold": -1.0},
        {"outlier_threshold": float("nan")},
        {"outliers_from_calibration": True},
    ],
)
def test_combinations_that_no_scheme_defines_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(RecipeError, match="'vectorwise'"):
        recipe.get("vectorwise").replace(**changes)


@pytest.mark.parametrize("name", SCHEMES)
def test_saved_models_come_back_equal(name: str, tmp_path: Path) -> None:
    model, x = pair(), activations(4, 30, outliers=(3, 17))
    original = quantized(name, model, x)
    expected = original(x)
    int8.save(original, tmp_path)
    loaded = int8.load(tmp_path, into=Pair())
    assert torch.equal(loaded(x), expected)
    assert type(loaded.layers[0].weight) is type(original.layers[0].weight)
    assert loaded.int8_recipe == recipe.get(name)
    torch.save(original.state_dict(), tmp_path / "state.pt")
    other = pair()
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), assign=True)
    assert torch.equal(other(x), expected)
    assert torch.equal(copy.deepcopy(original)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(original))(x), expected)


def test_a_file_without_its_outlier_columns_is_refused(tmp_path: Path) -> None:
    int8.save(quantized("llm-int8", pair(), activations(4, 30, outliers=(3,))), tmp_path)
    manifest = json.loads((tmp_path / saving.MANIFEST_FILE).read_text())
    manifest["beside"]["layers.0.weight"]["tensors"].append("layers.0.weight_outlier_index")
    (tmp_path / saving.MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=r"lacks 'layers\.0\.weight_outlier_index'"):
        int8.load(tmp_path, into=Pair())


def test_files_for_one_isa_load_on_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outlier columns that were kept in BF16 for AMX are multiplied in FP32 elsewhere."""
    monkeypatch.setattr("int8.isa.why_unsupported", lambda name: None)
    model, x = pair(), activations(4, 30, outliers=(3,))
    int8.save(int8.quantize(model, recipe.get("llm-int8").replace(weight_bits=7), isa="amx"), tmp_path)
    loaded = int8.load(tmp_path, into=Pair())
    assert loaded.layers[0].weight.outlier_weight.dtype == torch.bfloat16
    assert (loaded(x) - model(x)).norm() < 0.02 * model(x).norm()


def test_weights_keep_to_the_range_of_their_isa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("int8.isa.why_unsupported", lambda name: None)
    for name in ("absmax", "zeropoint", "rowwise", "llm-int8"):
        for target, limit in (("avx2", 63), ("vnni", 127)):
            model = int8.quantize(pair(), name, isa=target)
            assert {int(layer.weight.qdata.abs().max()) for layer in model.layers} == {limit}


def test_decomposition_needs_a_vectorwise_weight() -> None:
    with pytest.raises(QuantizationError, match="vector-wise"):
        DecomposedWeight.decomposed(Int8Weight.from_float_affine(torch.randn(3, 4), bits=8), 6.0, None, None)
    assert isa.effective() in isa.NAMES
