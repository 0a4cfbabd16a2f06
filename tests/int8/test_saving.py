from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from small_encoders import Encoder
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8Tensor
from transformers import AutoModel, BertConfig, BertModel, TorchAoConfig

import int8
from int8 import saving
from int8.errors import ArtifactError

Batches = list[dict[str, torch.Tensor]]


@pytest.fixture
def quantized(encoder: Encoder, calibration: Batches) -> nn.Module:
    return int8.quantize(encoder, "sq-static", calibration)


def test_round_trip_is_exact(quantized: nn.Module, calibration: Batches, tmp_path: Path) -> None:
    int8.save(quantized, tmp_path / "model")
    loaded = int8.load(tmp_path / "model", into=Encoder())
    assert torch.equal(loaded(**calibration[0]), quantized(**calibration[0]))
    assert loaded.int8_recipe == quantized.int8_recipe
    for name, module in int8.quantized_modules(quantized).items():
        other = int8.quantized_modules(loaded)[name].weight
        assert (other.scale.dtype, other.bits) == (module.weight.scale.dtype, module.weight.bits)


def test_loaded_models_compile_and_fuse(quantized: nn.Module, calibration: Batches, tmp_path: Path) -> None:
    int8.save(quantized, tmp_path)
    compiled = int8.compile(int8.load(tmp_path, into=Encoder()), dynamic=False)
    assert torch.allclose(compiled(**calibration[0]), quantized(**calibration[0]), atol=1e-5)
    assert compiled.fused_linears == 4


def test_state_dict_deepcopy_and_pickle(quantized: nn.Module, calibration: Batches, tmp_path: Path) -> None:
    expected = quantized(**calibration[0])
    torch.save(quantized.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    model = Encoder().eval()
    model.load_state_dict(state, assign=True)
    assert torch.equal(model(**calibration[0]), expected)
    assert torch.equal(copy.deepcopy(quantized)(**calibration[0]), expected)
    assert torch.equal(pickle.loads(pickle.dumps(quantized))(**calibration[0]), expected)


def test_tied_weights_stay_tied(encoder: Encoder, calibration: Batches, tmp_path: Path) -> None:
    encoder.layers[1].up.weight = encoder.layers[0].up.weight
    encoder.layers.append(encoder.layers[0])
    quantized = int8.quantize(encoder, "dynamic")
    int8.save(quantized, tmp_path)
    target = Encoder()
    target.layers.append(target.layers[0])
    loaded = int8.load(tmp_path, into=target)
    assert loaded.layers[2] is loaded.layers[0]
    assert torch.equal(loaded(**calibration[0]), quantized(**calibration[0]))


def test_the_file_holds_torchaos_own_class(quantized: nn.Module, tmp_path: Path) -> None:
    int8.save(quantized, tmp_path)
    with safe_open(str(tmp_path / saving.WEIGHTS_FILE), framework="pt") as file:
        assert json.loads(file.metadata()["layers.0.up.weight"])["_type"] == "Int8Tensor"
    tensors = saving._read_tensors(tmp_path)
    assert type(tensors["layers.0.up.weight"]) is Int8Tensor


def test_it_states_what_it_was_built_for(quantized: nn.Module, tmp_path: Path) -> None:
    int8.save(quantized, tmp_path)
    said = saving.describe(tmp_path)
    assert said["recipe"]["name"] == "sq-static"
    assert said["built_for_isa"] in int8.isa.NAMES  # type: ignore[attr-defined]
    assert said["weight_bits"] == quantized.layers[0].up.weight.bits
    assert len(said["quantized"]) == 4


def edit(folder: Path, **changes: object) -> None:
    path = folder / saving.MANIFEST_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_wide_weights_are_refused_where_kernels_would_saturate(
    encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("int8.isa.why_unsupported", lambda name: None)
    int8.save(int8.quantize(encoder, "dynamic", isa="vnni"), tmp_path)
    with pytest.raises(ArtifactError, match="saturate"):
        int8.load(tmp_path, into=Encoder(), isa="avx2")
    assert int8.load(tmp_path, into=Encoder(), isa="amx")


def test_narrow_weights_load_everywhere_with_a_word(
    encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("int8.isa.why_unsupported", lambda name: None)
    int8.save(int8.quantize(encoder, "dynamic", isa="avx2"), tmp_path)
    with pytest.warns(UserWarning, match="7-bit"):
        int8.load(tmp_path, into=Encoder(), isa="vnni")


def test_damage_is_one_clear_line(quantized: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="not a model saved"):
        int8.load(tmp_path / "nothing", into=Encoder())
    int8.save(quantized, tmp_path)
    with pytest.raises(ArtifactError, match="does not fit"):
        int8.load(tmp_path, into=Encoder(layers=3))
    edit(tmp_path, format=99)
    with pytest.raises(ArtifactError, match="format 99"):
        int8.load(tmp_path, into=Encoder())
    edit(tmp_path, format=saving.FORMAT)
    weights = tmp_path / saving.WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ArtifactError, match="damaged"):
        int8.load(tmp_path, into=Encoder())
    (tmp_path / saving.MANIFEST_FILE).write_text("{")
    with pytest.raises(ArtifactError, match="cannot be read"):
        int8.load(tmp_path, into=Encoder())


def test_only_quantized_models_are_saved(encoder: Encoder, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="nothing"):
        int8.save(encoder, tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ArtifactError, match="cannot save"):
        int8.save(int8.quantize(encoder, "dynamic"), file / "inside")


@pytest.mark.parametrize("recipe", ["sq-static", "sq-dynamic"])
def test_shifts_are_saved_with_their_bias(encoder: Encoder, calibration: Batches, tmp_path: Path, recipe: str) -> None:
    with torch.no_grad():
        encoder.layers[0].norm.bias[4] = 30
    quantized = int8.quantize(encoder, recipe, calibration)
    assert quantized.layers[1].up.weight.act_shift is not None, "the planted offset was not shifted away"
    int8.save(quantized, tmp_path)
    loaded = int8.load(tmp_path, into=Encoder())
    assert torch.equal(loaded(**calibration[0]), quantized(**calibration[0]))
    assert torch.equal(copy.deepcopy(loaded)(**calibration[0]), quantized(**calibration[0]))


def test_linears_that_share_an_input_save_its_shift_each(tmp_path: Path) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
            whole = torch.zeros(48)
            for index, layer in enumerate(self.layers):
                layer.bias = nn.Parameter(whole[16 * index : 16 * (index + 1)])  # views of one storage

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([layer(x) for layer in self.layers])

    torch.manual_seed(0)
    x = torch.randn(50, 16)
    x[:, 3] += 40
    quantized = int8.quantize(Attention().eval(), "sq-dynamic", [{"x": x}])
    shifts = [module.weight.act_shift for module in int8.quantized_modules(quantized).values()]
    assert shifts[0] is not None
    assert len({shift.data_ptr() for shift in shifts}) == 1, "they share memory, which is what the test is about"
    int8.save(quantized, tmp_path)
    assert torch.equal(int8.load(tmp_path, into=Attention())(x), quantized(x))


@pytest.fixture
def bert() -> BertModel:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
    return BertModel(config).eval()


@torch.no_grad()
def test_transformers_loads_what_it_saved_with_torchaos_config(
    bert: BertModel, calibration: Batches, tmp_path: Path
) -> None:
    recipe = int8.recipe.get("sq-dynamic").replace(search=False, alpha=0.8)  # type: ignore[attr-defined]
    quantized = int8.quantize(bert, recipe, calibration)
    int8.save_pretrained(quantized, tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert type(loaded.encoder.layer[0].output.dense.weight) is Int8Tensor
    adopted = int8.adopt(loaded)
    assert len(int8.quantized_modules(adopted)) == len(int8.quantized_modules(quantized)) == 12
    batch = calibration[0]
    assert torch.equal(adopted(**batch).last_hidden_state, quantized(**batch).last_hidden_state)
    assert type(loaded.encoder.layer[0].output.dense.weight) is Int8Tensor  # the original is left as it was
    assert int8.quantized_modules(quantized)  # and so is what was saved


@torch.no_grad()
def test_a_model_saved_by_torchao_gains_our_kernels(bert: BertModel, calibration: Batches, tmp_path: Path) -> None:
    bert.save_pretrained(tmp_path / "float")
    narrow = int8.recipe.get("dynamic").resolve_weight_bits(int8.isa.effective()) == 7  # type: ignore[attr-defined]
    config = TorchAoConfig(Int8DynamicActivationInt8WeightConfig(set_inductor_config=False, reduce_range=narrow))
    AutoModel.from_pretrained(tmp_path / "float", quantization_config=config).save_pretrained(tmp_path / "theirs")
    theirs = AutoModel.from_pretrained(tmp_path / "theirs").eval()
    batch = calibration[0]
    compiled = int8.compile(int8.adopt(theirs), dynamic=False)
    found, expected = compiled(**batch).last_hidden_state.float(), theirs(**batch).last_hidden_state
    assert compiled.fused_linears == compiled.quantized_linears == 13  # theirs takes the pooler as well
    assert 10 * torch.log10(expected.square().sum() / (expected - found).square().sum()) > 25


def test_what_the_loader_would_lose_is_refused(
    bert: BertModel, quantized: nn.Module, calibration: Batches, tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError, match="would lose a part of it"):
        int8.save_pretrained(int8.quantize(bert, "sq-static", calibration), tmp_path)
    with pytest.raises(ArtifactError, match="a quantized model of transformers"):
        int8.save_pretrained(quantized, tmp_path)
    with pytest.raises(ArtifactError, match="no linear of this model"):
        int8.adopt(bert)
    assert not list(tmp_path.iterdir())
