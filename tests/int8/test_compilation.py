"""Compiled models against eager ones, and what became of their linears."""

from __future__ import annotations

import concurrent.futures

import pytest
import torch
from small_encoders import Block, Encoder, make_batch, sqnr_db
from torch import nn
from torch._dynamo.utils import counters

import int8
from int8 import isa
from int8 import recipe as recipes
from int8.compilation import check_fusion, pack
from int8.errors import FusionError, QuantizationError, ToolchainError
from int8.graph.lower_linear import FusionReport
from int8.kernels.layout import layout_of
from int8.kernels.selection import own_kernels

Batches = list[dict[str, torch.Tensor]]


@pytest.mark.parametrize("recipe", ["static", "sq-static", "sq-dynamic"])
@pytest.mark.parametrize("bias", [True, False])
def test_compiled_equals_the_reference(calibration: Batches, recipe: str, bias: bool) -> None:
    """One sequence of one token is where sizes of 1 with strides of 0 were left uncomputed (pytorch/pytorch#195066)."""
    torch.manual_seed(1)
    model = Encoder(width=30, inner=21, bias=bias).eval()  # sizes that no vector divides
    quantized = int8.quantize(model, recipe, calibration)
    compiled = int8.compile(quantized, dynamic=False)
    for batch in (make_batch(3, 5, seed=5), make_batch(1, 1, seed=6)):
        assert torch.allclose(compiled(**batch), quantized(**batch), atol=1e-5)
    assert compiled.linears == 5
    assert compiled.quantized_linears == compiled.fused_linears == 4
    assert len(compiled.reports) == 2


@pytest.mark.parametrize("recipe", ["sq-static", "sq-dynamic"])
def test_affine_and_shifted_activations_compile(calibration: Batches, recipe: str) -> None:
    """A planted offset makes the search shift, GELU outputs make it use zero points."""
    torch.manual_seed(2)
    model = Encoder(width=32, inner=40).eval()
    with torch.no_grad():
        model.layers[0].norm.bias[4] = 30
    quantized = int8.quantize(model, recipe, calibration)
    weights = [module.weight for module in int8.quantized_modules(quantized).values()]
    assert any(weight.act_shift is not None for weight in weights)
    assert any(weight.act_affine for weight in weights)
    compiled = int8.compile(quantized, dynamic=False)
    batch = make_batch(3, 5, seed=5)
    assert sqnr_db(quantized(**batch), compiled(**batch)) > 60
    assert compiled.fused_linears == 4


def test_extreme_levels_do_not_saturate() -> None:
    """All weights and activations at the ends of their ranges: where pairs of products overflow 16 bit if they can."""
    model = nn.Sequential(nn.Linear(64, 16)).eval()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].weight[1::2] = -1.0
    x = torch.ones(4, 64)
    x[1] = -1.0
    quantized = int8.quantize(model, "dynamic")
    expected = quantized(x)
    result = int8.compile(quantized, dynamic=False)(x)
    assert torch.allclose(result, expected, rtol=1e-5, atol=1e-4)
    assert sqnr_db(model(x), result) > 40


@pytest.mark.parametrize(("name", "kernel"), [("zeropoint", "auto"), ("llm-int8", "auto"), ("dynamic", "onednn")])
def test_wide_weights_are_refused_where_onednn_would_saturate(
    monkeypatch: pytest.MonkeyPatch, name: str, kernel: str
) -> None:
    """Our own kernels never saturate; what they do not run, oneDNN does (microsoft/onnxruntime#5849)."""
    monkeypatch.setenv("INT8_KERNEL", kernel)
    wide = recipes.get(name).replace(weight_bits=8)
    model = int8.quantize(nn.Sequential(nn.Linear(64, 16)).eval(), wide)
    monkeypatch.setattr(isa._State, "enforced", "avx512")
    with pytest.raises(QuantizationError, match="8-bit weights would saturate"):
        int8.compile(model)


def test_wide_weights_do_not_saturate_in_our_kernels() -> None:
    """Whatever the ISA: they are never given to a kernel that adds pairs in 16 bit (microsoft/onnxruntime#5849)."""
    model = nn.Sequential(nn.Linear(64, 16, bias=False)).eval().requires_grad_(False)
    model[0].weight.fill_(1.0)
    x = torch.ones(4, 64)
    x[1] = -1.0
    wide = int8.quantize(model, recipes.get("dynamic").replace(weight_bits=8))
    compiled = int8.compile(wide, recipe=wide.int8_recipe.replace(compute_dtype="fp32"), dynamic=False)
    assert torch.allclose(compiled(x), model(x), rtol=1e-6)


def test_wide_sums_are_exact_enough() -> None:
    """K at which accumulators exceed the integers that FP32 holds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5120, 8)).eval()
    x = torch.rand(2, 5120) + 1
    quantized = int8.quantize(model, "dynamic")
    assert torch.allclose(int8.compile(quantized)(x), quantized(x), rtol=1e-5, atol=1e-5)


def test_odd_sizes_read_by_two_threads() -> None:
    """Inner sizes that no vector divides, heads of two and three labels, and an input that nobody writes to: a row of
    zeros once made others divide by zero, and an input edited in place raced with its other readers.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(770, 3), nn.Linear(3, 1), nn.Linear(1, 2)).eval()
    quantized = int8.quantize(model, "dynamic")
    compiled = int8.compile(quantized, recipe=quantized.int8_recipe.replace(compute_dtype="fp32"), dynamic=False)
    x = torch.randn(5, 770)
    x[2] = 0
    before, expected = x.clone(), quantized(x)
    assert torch.allclose(compiled(x), expected, rtol=1e-5, atol=1e-5)
    assert compiled.fused_linears == 3
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = list(pool.map(compiled, [x] * 20))
    assert all(torch.allclose(result, expected, rtol=1e-5, atol=1e-5) for result in results)
    with torch.inference_mode():
        of_inference = before + 0.0
        assert torch.allclose(compiled(of_inference), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(of_inference, before)
    assert torch.equal(x, before)


def test_zero_tokens_stay_zero_and_finite(encoder: Encoder, calibration: Batches) -> None:
    model = nn.Sequential(nn.Linear(16, 8, bias=False)).eval()
    compiled = int8.compile(int8.quantize(model, "dynamic"), dynamic=False)
    x = torch.randn(3, 16)
    x[1] = 0
    result = compiled(x)
    assert result[1].abs().max() == 0
    assert bool(torch.isfinite(result).all())


def test_a_shared_layer_is_one_linear_called_often() -> None:
    """As in ALBERT, with a residual behind each call (pytorch/ao#4478)."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block(16, 24)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(12):
                x = self.layers[0](x)
            return x

    torch.manual_seed(0)
    model = Shared().eval()
    batches = [{"x": torch.randn(2, 3, 16)}]
    quantized = int8.quantize(model, "sq-static", batches)
    compiled = int8.compile(quantized, dynamic=False)
    before = batches[0]["x"].clone()
    assert torch.allclose(compiled(**batches[0]), quantized(x=before), atol=1e-5)
    assert torch.equal(batches[0]["x"], before), "the compiled model changed its input"
    assert (compiled.quantized_linears, compiled.fused_linears) == (2, 2)
    assert compiled.reports[0].fused_calls == compiled.reports[0].calls == 24


def test_one_input_is_quantized_once() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([layer(x) for layer in self.layers])

    model = Attention().eval()
    batch = {"x": torch.randn(4, 16)}
    packed = pack(int8.quantize(model, "sq-static", [batch]))
    first, second, third = packed.layers
    assert first.act_multiplier is second.act_multiplier is third.act_multiplier
    assert first.act_scale is second.act_scale is third.act_scale


def test_packing_keeps_the_levels(encoder: Encoder, calibration: Batches) -> None:
    quantized = int8.quantize(encoder, "sq-static", calibration)
    packed = pack(quantized)
    weight = quantized.layers[0].up.weight.qdata
    layout = layout_of(own_kernels(isa.effective(), 7 if isa.effective() in ("avx2", "avx512") else 8)[0])
    assert torch.equal(torch.ops.int8.unpack(packed.layers[0].up.qweight, *weight.shape, layout), weight)
    assert packed.embed.weight is quantized.embed.weight
    assert isinstance(quantized.layers[0].up, nn.Linear)


def test_bf16_compute_fuses_every_linear(encoder: Encoder, calibration: Batches) -> None:
    """BF16 is what recipes use on AMX; elsewhere it is emulated, and right all the same."""
    quantized = int8.quantize(encoder, "sq-static", calibration)
    recipe = quantized.int8_recipe.replace(compute_dtype="bf16")
    compiled = int8.compile(quantized, recipe=recipe, dynamic=False)
    result = compiled(**calibration[0])
    assert compiled.fused_linears == 4
    assert sqnr_db(quantized(**calibration[0]), result.float()) > 25


@pytest.mark.parametrize("recipe", ["static", "dynamic"])
def test_bf16_models_fuse_with_bias_and_without(recipe: str) -> None:
    """Every dtype compiles, or is refused before anything is compiled (pytorch/pytorch#128263)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 20, bias=False)).eval()
    x = torch.randn(6, 24)
    quantized = int8.quantize(model.to(torch.bfloat16), recipe, [{"input": x.bfloat16()}], accept=lambda *_: True)
    compiled = int8.compile(quantized, dynamic=False)
    result = compiled(x.bfloat16())
    assert result.dtype == torch.bfloat16
    assert compiled.fused_linears == 2
    assert sqnr_db(quantized(x.bfloat16()).float(), result.float()) > 25
    with pytest.raises(QuantizationError, match="float16"):
        int8.quantize(model.half(), recipe, [{"input": x.half()}], accept=lambda *_: True)


def test_maximal_autotuning_takes_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale of one row once failed on indexing there (pytorch/pytorch#147033)."""
    from torch._inductor import config as inductor_config

    monkeypatch.setenv("INT8_KERNEL", "onednn")
    model = nn.Sequential(nn.Linear(32, 16)).eval()
    quantized = int8.quantize(model, "dynamic")
    x = torch.randn(1, 1, 32)
    with inductor_config.patch(max_autotune=True):
        compiled = int8.compile(quantized, recipe=quantized.int8_recipe.replace(compute_dtype="fp32"), dynamic=False)
        assert torch.allclose(compiled(x), quantized(x), rtol=1e-5, atol=1e-5)
    assert compiled.fused_linears == 1


def test_a_model_whose_linears_vanished_raises() -> None:
    """A quantizer that another's conversion does not know quantizes nothing without a word (pytorch/pytorch#160095)."""
    with pytest.raises(FusionError, match="0 of 0 calls"):
        check_fusion(FusionReport(graphs=1), quantized_linears=4, allow_unfused=False)


def test_bf16_models_work(encoder: Encoder, calibration: Batches) -> None:
    model = encoder.to(torch.bfloat16)
    quantized = int8.quantize(model, "sq-dynamic", calibration)
    compiled = int8.compile(quantized, dynamic=False)
    result = compiled(**calibration[0])
    assert result.dtype == torch.bfloat16
    assert compiled.fused_linears == 4
    assert sqnr_db(quantized(**calibration[0]).float(), result.float()) > 25


def test_lengths_are_bounded_to_two_compilations(encoder: Encoder, calibration: Batches) -> None:
    compiled = int8.compile(int8.quantize(encoder, "sq-dynamic", calibration))
    for length in range(3, 13):
        compiled(**make_batch(2, length, seed=length))
    assert len(compiled.reports) <= 2
    assert all(report.complete and len(report.fused_weights) == 4 for report in compiled.reports)


def test_many_models_of_one_class_all_compile(calibration: Batches) -> None:
    """Dynamo counts recompilations by code object; the ninth model of a class must not run uncompiled."""
    for seed in range(10):
        torch.manual_seed(seed)
        compiled = int8.compile(int8.quantize(nn.Sequential(nn.Linear(8, 8)).eval(), "dynamic"), dynamic=False)
        compiled(torch.randn(2, 8))
        assert compiled.fused_linears == 1


def test_an_unfused_linear_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("int8.graph.lower_linear.Linear.out_dtype", torch.float64, raising=False)
    model = int8.quantize(nn.Sequential(nn.Linear(8, 8)).eval(), "dynamic")
    x = torch.randn(2, 8).double()
    with pytest.raises(FusionError, match="1 of 1 calls"):
        int8.compile(model)(x)
    with pytest.warns(RuntimeWarning, match="outside the"):
        result = int8.compile(model, allow_unfused=True)(x)
    assert torch.allclose(result, model(x))


def test_gradient_mode_does_not_undo_fusion(encoder: Encoder, calibration: Batches) -> None:
    compiled = int8.compile(int8.quantize(encoder, "sq-static", calibration), dynamic=False)
    assert torch.is_grad_enabled()
    compiled(**calibration[0])
    assert compiled.fused_linears == 4


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_baselines_compile(encoder: Encoder, calibration: Batches, recipe: str) -> None:
    compiled = int8.compile(encoder, recipe=recipe, dynamic=False)
    assert sqnr_db(encoder(**calibration[0]), compiled(**calibration[0]).float()) > (90 if recipe == "fp32" else 25)
    assert (compiled.quantized_linears, compiled.fused_linears) == (0, 0)


def test_global_settings_come_back(encoder: Encoder, calibration: Batches) -> None:
    from torch._dynamo import config as dynamo_config
    from torch._inductor import config as inductor_config

    before = (inductor_config.freezing, dynamo_config.recompile_limit, dynamo_config.fail_on_recompile_limit_hit)
    int8.compile(int8.quantize(encoder, "sq-static", calibration), dynamic=False)(**calibration[0])
    after = (inductor_config.freezing, dynamo_config.recompile_limit, dynamo_config.fail_on_recompile_limit_hit)
    assert before == after


def test_models_that_cannot_be_compiled_are_refused(encoder: Encoder, calibration: Batches) -> None:
    with pytest.raises(QuantizationError, match="float16"):
        int8.compile(Encoder().half().eval(), recipe="fp32")
    with pytest.raises(QuantizationError, match="eval"):
        int8.compile(Encoder().train(), recipe="fp32")
    with pytest.raises(QuantizationError, match="not quantized"):
        int8.compile(encoder, recipe="sq-static")
    with pytest.raises(QuantizationError, match="is quantized"):
        int8.compile(int8.quantize(encoder, "dynamic"), recipe="fp32")


def test_a_missing_compiler_is_one_clear_line(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ToolchainError, match="apt-get install"):
        int8.compile(encoder, recipe="fp32")


@pytest.mark.parametrize(("effective", "dtype"), [("amx", torch.int8), ("vnni", torch.uint8)])
def test_signedness_follows_the_isa(monkeypatch: pytest.MonkeyPatch, effective: str, dtype: torch.dtype) -> None:
    """Signed activations where AMX multiplies them, unsigned elsewhere. Looks at the graph; nothing is executed."""
    from int8.graph import lower_linear

    seen: list[torch.dtype] = []
    original = lower_linear.Emitter._levels

    def spy(self: lower_linear.Emitter, scaled: torch.fx.Node) -> torch.fx.Node:
        node = original(self, scaled)
        seen.append(node.args[1])
        return node

    monkeypatch.setenv("INT8_KERNEL", "onednn")
    monkeypatch.setattr(isa._State, "enforced", effective)
    monkeypatch.setattr(lower_linear.Emitter, "_levels", spy)
    model = int8.quantize(nn.Sequential(nn.Linear(8, 8)).eval(), "dynamic", isa=isa.best())
    compiled = int8.compile(model, recipe=model.int8_recipe.replace(compute_dtype="fp32"), dynamic=False)
    compiled(torch.randn(2, 8))
    assert seen == [dtype]


def test_no_template_kernel_is_compiled_by_default(encoder: Encoder, calibration: Batches) -> None:
    counters.clear()
    int8.compile(int8.quantize(encoder, "sq-static", calibration), dynamic=False)(**calibration[0])
    assert counters["inductor"]["cpp_templated_kernel_counter"] == 0
