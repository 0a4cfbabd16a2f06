"""Models by name, on tiny ones made here; real weights under the marker ``assets``."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import assets, encoders, models, rewrites
from harness.errors import AssetError, UsageError

TINY = ("tiny-bert", "tiny-distilbert", "tiny-xlmr")


@dataclass(frozen=True)
class Shape:
    batch: int
    seq: int


def padded_batch(model: models.LoadedModel, seq: int = 24, real: int = 9) -> dict[str, torch.Tensor]:
    """Two rows, the second with ``real`` tokens and padding behind them."""
    batch = models.batch_inputs(model, Shape(2, seq), seed=5)
    config: Any = model.module.backbone.config
    batch["input_ids"][1, real:] = config.pad_token_id
    batch["attention_mask"][1, real:] = 0
    return batch


def run(model: models.LoadedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """(tokens, H) hidden states of the tokens that are no padding."""
    output: torch.Tensor = model.module(**{name: batch[name] for name in model.inputs})
    return output[batch["attention_mask"].bool()]


def test_names_need_no_torch() -> None:
    code = (
        "import sys; from harness import models, tasks; models.known(); tasks.known()\n"
        "models.info('minilm'); tasks.unsupported('reviews', 'bert-large')\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    root = Path(models.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_listings_leave_the_tiny_models_out() -> None:
    assert "minilm" in models.known() and not set(TINY) & set(models.known())
    assert set(TINY) <= set(models.known(hidden=True))


def test_the_catalog_is_sound() -> None:
    for name in models.known(hidden=True):
        row = models.info(name)
        assert row is not None
        assert row.family in encoders.FAMILIES
        assert row.weights == ("real" if name.startswith("minilm") else "synthetic")
        assert set(assets.catalog("models")[name].get("rewrites", [])) <= set(rewrites.REWRITES)


@pytest.mark.parametrize(
    ("name", "linears", "hidden", "longest"),
    [("bert-large", 144, 1024, 512), ("distilbert-base", 36, 768, 512), ("xlmr-base", 72, 768, 512)],
)
def test_full_size_shapes(name: str, linears: int, hidden: int, longest: int) -> None:
    row = assets.catalog("models")[name]
    with torch.device("meta"):
        backbone = encoders.from_config(encoders.new_config(row["family"], row["config"]))
    config: Any = backbone.config
    assert sum(isinstance(module, torch.nn.Linear) for module in backbone.modules()) == linears
    assert (config.hidden_size, encoders.max_seq(config)) == (hidden, longest)


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_model_is_ready_to_run(name: str) -> None:
    model = models.load(name)
    batch = models.batch_inputs(model, Shape(3, 20), seed=1)
    output = model.module(**batch)
    assert tuple(batch) == model.inputs == model.module.inputs
    assert ("token_type_ids" in batch) == (model.family == "bert")
    assert output.shape == (3, 20, 64) and output.dtype == torch.float32 and torch.isfinite(output).all()
    assert not model.module.training and not output.requires_grad
    assert model.weights == "synthetic" and model.module.backbone.config._attn_implementation == "sdpa"
    assert not any("pooler" in part for part, _ in model.module.named_modules())


@pytest.mark.parametrize("name", TINY)
def test_padding_does_not_change_a_row(name: str) -> None:
    model = models.load(name)
    batch = padded_batch(model)
    alone = {key: value[1:, :9] for key, value in batch.items()}
    together = model.module(**batch)[1, :9]
    assert torch.allclose(model.module(**alone)[0], together, atol=1e-5)


def test_loading_twice_gives_the_same_weights() -> None:
    first, second = (encoders.weights_sha256(models.load("tiny-bert").module) for _ in range(2))
    other = encoders.weights_sha256(models.load("tiny-distilbert").module)
    assert first == second != other


def test_a_shallow_synthetic_model_is_the_start_of_a_deep_one() -> None:
    shape = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    shallow, deep = (
        encoders.fill_synthetic(encoders.empty("bert", shape | {"num_hidden_layers": layers}), seed=7).state_dict()
        for layers in (1, 2)
    )
    assert all(torch.equal(value, deep[name]) for name, value in shallow.items())
    assert len(deep) > len(shallow)


def test_random_batches_are_repeatable_and_free_of_special_tokens() -> None:
    model = models.load("tiny-xlmr")
    first, second = (models.batch_inputs(model, Shape(8, 100), seed=3)["input_ids"] for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, models.batch_inputs(model, Shape(8, 100), seed=4)["input_ids"])
    assert not set(first.flatten().tolist()) & set(model.tokenizer.all_special_ids)


def test_a_sequence_longer_than_the_model_takes_is_refused() -> None:
    model = models.load("tiny-xlmr")
    longest = models.batch_inputs(model, Shape(1, model.max_seq), seed=0)
    assert torch.isfinite(model.module(**longest)).all()
    with pytest.raises(UsageError, match=f"at most {model.max_seq} tokens"):
        models.batch_inputs(model, Shape(1, model.max_seq + 1), seed=0)


@pytest.mark.parametrize("name", TINY)
def test_the_wrapper_traces_whole(name: str) -> None:
    model = models.load(name)
    batch = padded_batch(model)
    exported = torch.export.export(model.module, (), batch)
    assert torch.allclose(exported.module()(**batch), model.module(**batch), atol=1e-6)


# --- folders and the hub ---------------------------------------------------------------------------------------------


def save(name: str, folder: Path) -> models.LoadedModel:
    model = models.load(name)
    model.module.backbone.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", TINY)
def test_a_folder_gives_the_model_that_was_saved(name: str, tmp_path: Path) -> None:
    saved = save(name, tmp_path / "m")
    found = models.load(str(tmp_path / "m"))
    batch = padded_batch(saved)
    assert torch.equal(found.module(**batch), saved.module(**batch))
    assert (found.family, found.weights, found.inputs) == (saved.family, "real", saved.inputs)
    text = "a warm film"
    assert found.tokenizer(text)["input_ids"] == saved.tokenizer(text)["input_ids"]


def test_a_fine_tuned_checkpoint_gives_its_encoder(tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification

    torch.manual_seed(0)
    config = encoders.new_config("bert", dict(assets.catalog("models")["tiny-bert"]["config"], vocab_size=40))
    whole = BertForSequenceClassification(config).eval().half()
    whole.save_pretrained(tmp_path)
    found = models.load(str(tmp_path))
    assert found.tokenizer is None
    assert {parameter.dtype for parameter in found.module.parameters()} == {torch.float32}
    assert not any("pooler" in name or "classifier" in name for name, _ in found.module.named_parameters())
    batch = models.batch_inputs(found, Shape(2, 6), seed=0)
    with torch.no_grad():
        expected = whole.float().bert(**batch).last_hidden_state
    assert torch.allclose(found.module(**batch), expected, atol=1e-6)


def test_broken_folders_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(AssetError, match=r"has no config\.json"):
        models.load(str(tmp_path))
    save("tiny-bert", tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(AssetError, match=r"cannot be read: .*check its files") as caught:
        models.load(str(tmp_path))
    assert "\n" not in str(caught.value)
    weights.unlink()
    with pytest.raises(AssetError, match="cannot be read"):
        models.load(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-family"}))
    with pytest.raises(AssetError, match="cannot be read"):
        models.load(str(tmp_path))


def test_unknown_names_give_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown model 'minlm'; did you mean minilm"):
        models.load("minlm")
    with pytest.raises(UsageError, match=r"there is no folder \./nowhere"):
        models.load("./nowhere")


def test_a_hub_id_without_a_hub_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(
        AssetError, match=r"model nobody/nothing is not in the local hub cache and .* cannot be reached"
    ):
        models.load("nobody/nothing")


# --- rewrites --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rewrite", [["distilbert"], ["xlm-roberta"]])
def test_another_family_has_the_same_function(rewrite: list[str]) -> None:
    model = models.load("tiny-bert")
    before = encoders.weights_sha256(model.module)
    rewritten = encoders.finish(rewrites.apply(rewrite, model.module.backbone))
    batch = padded_batch(model)
    mask = batch["attention_mask"].bool()
    expected, found = (
        module(**{name: batch[name] for name in module.inputs})[mask] for module in (model.module, rewritten)
    )
    assert rewritten.backbone.config.model_type == rewrite[0]
    assert "token_type_ids" not in rewritten.inputs
    assert torch.allclose(found, expected, atol=1e-5)
    assert encoders.weights_sha256(model.module) == before
    assert encoders.max_seq(rewritten.backbone.config) == model.max_seq


def test_a_bert_that_no_distilbert_can_be_is_refused() -> None:
    shape = dict(assets.catalog("models")["tiny-bert"]["config"], vocab_size=40, layer_norm_eps=1e-5)
    with pytest.raises(UsageError, match="layer_norm_eps"):
        rewrites.to_distilbert(encoders.empty("bert", shape))
    with pytest.raises(UsageError, match="only a BERT"):
        rewrites.to_xlm_roberta(models.load("tiny-distilbert").module.backbone)


def linear_inputs(module: encoders.Encoder, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """(tokens, K) input of each linear."""
    seen: dict[str, torch.Tensor] = {}
    handles = [
        part.register_forward_pre_hook(lambda _part, args, name=name: seen.__setitem__(name, args[0].flatten(0, -2)))
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.Linear)
    ]
    module(**{name: batch[name] for name in module.inputs})
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", TINY)
def test_planted_outliers_are_seen_by_the_linears_and_by_nobody_else(name: str) -> None:
    model = models.load(name)
    planted = encoders.finish(rewrites.plant_outliers(model.module.backbone))
    batch = padded_batch(model)
    mask = batch["attention_mask"].bool()
    expected, found = (module(**batch)[mask] for module in (model.module, planted))
    assert torch.allclose(found, expected, atol=5e-5)
    channels = list(rewrites.outlier_channels(model.hidden_size))
    assert len(set(channels)) == rewrites.OUTLIER_CHANNELS
    before, after = linear_inputs(model.module, batch), linear_inputs(planted, batch)
    read_from_norms = [
        key for key in after if any(part in key for part in ("query", "key", "value", "q_lin", "k_lin", "v_lin"))
    ] + [key for key in after if "intermediate" in key or "lin1" in key]
    assert len(read_from_norms) == 8
    for key in read_from_norms:
        assert (after[key][:, channels].abs().median(dim=0).values >= 6).all(), key
        others = [channel for channel in range(model.hidden_size) if channel not in channels]
        assert torch.allclose(after[key][:, others], before[key][:, others], atol=5e-5)


# --- real weights ----------------------------------------------------------------------------------------------------


@pytest.fixture
def minilm() -> models.LoadedModel:
    if not (assets.root() / assets.get("all-minilm-l6-v2").folder).exists():
        pytest.skip("the weights of minilm are not here: run `harness fetch`")
    return models.load("minilm", offline=True)


@pytest.mark.assets
@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("minilm-distilbert", 1e-5),
        ("minilm-xlmr", 1e-5),
        ("minilm-outliers", 4e-5),
        ("minilm-distilbert-outliers", 4e-5),
        ("minilm-xlmr-outliers", 4e-5),
    ],
)
def test_the_relatives_of_minilm_compute_the_same(minilm: models.LoadedModel, name: str, tolerance: float) -> None:
    relative = models.load(name, offline=True)
    row = models.info(name)
    assert row is not None and (relative.family, relative.weights) == (row.family, "real")
    batch = padded_batch(minilm, seq=40, real=17)
    assert torch.allclose(run(relative, batch), run(minilm, batch), rtol=0, atol=tolerance)
    assert relative.max_seq == minilm.max_seq == 512


@pytest.mark.assets
def test_minilm_is_what_its_row_says(minilm: models.LoadedModel) -> None:
    assert (minilm.family, minilm.weights, minilm.hidden_size, minilm.vocab_size) == ("bert", "real", 384, 30522)
    assert sum(isinstance(module, torch.nn.Linear) for module in minilm.module.modules()) == 36
    assert minilm.tokenizer("A good film.")["input_ids"] == [101, 1037, 2204, 2143, 1012, 102]
