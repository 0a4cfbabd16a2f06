"""What is fused into our kernels, on the graphs of real encoders and on small ones; counted, and by values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import int8
from int8 import isa, recipe
from int8.compilation import CompiledModel
from int8.errors import QuantizationError
from int8.evidence import own_kernel_calls
from int8.kernels.layout import KERNELS

LAYERS = 2


@pytest.fixture(autouse=True)
def our_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what measuring chooses: what is fused is tested."""
    monkeypatch.setenv("INT8_KERNEL", KERNELS[isa.effective()][0])


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(vocab_size=60, **_SIZES), add_pooling_layer=False)


def xlm_roberta() -> nn.Module:
    from transformers import XLMRobertaConfig, XLMRobertaModel

    return XLMRobertaModel(XLMRobertaConfig(vocab_size=60, **_SIZES), add_pooling_layer=False)


def distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertModel

    config = DistilBertConfig(vocab_size=60, dim=32, n_layers=LAYERS, n_heads=2, hidden_dim=48)
    return DistilBertModel(config)


_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}


class Hidden(nn.Module):
    """An encoder whose result is its last hidden state."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return hidden


def batch(seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def compiled_of(make: Callable[[], nn.Module], name: str, dtype: str) -> tuple[nn.Module, CompiledModel]:
    torch.manual_seed(0)
    quantized = int8.quantize(Hidden(make()).eval(), name, [batch(1), batch(2)])
    chosen = recipe.get(name).replace(compute_dtype=dtype)
    return quantized, int8.compile(quantized, recipe=chosen, dynamic=False)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["sq-static", "sq-dynamic"])
@pytest.mark.parametrize("make", [bert, distilbert, xlm_roberta])
def test_fusions_of_a_layer(make: Callable[[], nn.Module], name: str, dtype: str) -> None:
    quantized, compiled = compiled_of(make, name, dtype)
    result = compiled(**batch())
    (report,) = compiled.reports
    assert compiled.fused_linears == compiled.quantized_linears == 6 * LAYERS
    expected = {"joint": 3 * LAYERS, "gelu": LAYERS, "residual": 2 * LAYERS}
    assert dict(report.parts) == expected | ({"int8": LAYERS} if name == "sq-static" else {})
    with torch.no_grad():
        reference = quantized(**batch())
    noise = (result.float() - reference).square().mean() / reference.square().mean()
    assert noise < {"fp32": 1e-5, "bf16": 2e-3}[dtype]


def test_symbolic_lengths_keep_every_fusion_and_kernel() -> None:
    """Templates that need known sizes go unused without a word (pytorch/pytorch#131929): ten lengths take at most two
    compilations, and the second fuses and runs what the first does.
    """
    torch.manual_seed(0)
    quantized = int8.quantize(Hidden(bert()).eval(), "sq-static", [batch(1), batch(2)])
    compiled = int8.compile(quantized, recipe=recipe.get("sq-static").replace(compute_dtype="fp32"))
    seen = []
    for length in range(5, 15):
        ids = torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(length))
        before = own_kernel_calls()
        result = compiled(input_ids=ids, attention_mask=torch.ones_like(ids))
        after = own_kernel_calls()
        seen.append({name: after[name] - before.get(name, 0) for name in KERNELS[isa.effective()] if name in after})
    with torch.no_grad():
        reference = quantized(input_ids=ids, attention_mask=torch.ones_like(ids))
    assert (result - reference).square().mean() < 1e-5 * reference.square().mean()
    first, *others = compiled.reports
    assert len(others) <= 1
    assert all((report.parts, report.fused_calls) == (first.parts, first.fused_calls) for report in others)
    assert first.parts["joint"] == 3 * LAYERS
    assert seen == [{KERNELS[isa.effective()][0]: 4 * LAYERS}] * 10


class Between(nn.Module):
    """Two linears in a numbered layer with something between them."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([nn.Linear(24, 40), nn.Linear(40, 24)])])
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers[0]  # type: ignore[misc]
        result: Tensor = second(self.function(first(x)))
        return result


def handwritten_gelu(y: Tensor) -> Tensor:
    return 0.5 * y * (1.0 + torch.tanh(0.7978845608028654 * (y + 0.044715 * torch.pow(y, 3.0))))


def twice(y: Tensor) -> Tensor:
    activated = nn.functional.gelu(y)
    return activated + activated.mean()


BETWEEN: dict[str, tuple[Callable[[Tensor], Tensor], set[str]]] = {
    "nothing": (lambda y: y, {"int8"}),
    "gelu": (nn.functional.gelu, {"gelu", "int8"}),
    "tanh form": (handwritten_gelu, {"gelu_tanh", "int8"}),
    "relu": (torch.relu, {"relu", "int8"}),
    "silu, which no kernel has": (nn.functional.silu, set()),
    "almost a gelu": (lambda y: nn.functional.gelu(1.001 * y), set()),
    "read twice": (twice, {"gelu"}),
    "an addition of one row": (lambda y: y + torch.ones(40), set()),
    "a reversed addition of the result itself": (lambda y: y + y, set()),
    "half a gelu": (lambda y: nn.functional.gelu(y) * y, set()),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_lies_between_two_linears(name: str) -> None:
    function, parts = BETWEEN[name]
    torch.manual_seed(1)
    model = Between(function).eval()
    x = torch.randn(5, 7, 24)
    quantized = int8.quantize(model, "static", [{"x": x}])
    compiled = int8.compile(quantized, dynamic=False)
    result = compiled(x)
    assert set(compiled.reports[0].parts) == parts
    assert compiled.fused_linears == 2
    with torch.no_grad():
        assert torch.allclose(result, quantized(x), atol=2e-2)  # one level of the second linear's input


def test_without_bias_and_with_one_token() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Sequential(nn.Linear(20, 30, bias=False), nn.ReLU(), nn.Linear(30, 5, bias=False))).eval()
    for name in ("static", "dynamic"):
        quantized = int8.quantize(model, name, [{"input": torch.randn(8, 20)}], accept=lambda *_: True)
        compiled = int8.compile(quantized, dynamic=False)
        x = torch.randn(1, 20)
        with torch.no_grad():
            assert torch.allclose(compiled(x), quantized(x), atol=2e-2)
        assert compiled.fused_linears == 2


def test_an_override_that_names_no_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INT8_KERNEL", "int8:other")
    model = int8.quantize(nn.Sequential(nn.Linear(8, 8)).eval(), "dynamic")
    with pytest.raises(QuantizationError, match="names no kernel"):
        int8.compile(model)
