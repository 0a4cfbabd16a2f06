"""Task ``text``: perplexity of a causal model, on a tiny OPT that knows a chain of words by heart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

import int8
from harness import encoders, matrix, models, outlier_report, runner, sources, tasks
from harness.errors import AssetError, UsageError
from harness.records import Store
from harness.tasks import text

WORDS = tuple(f"w{index}" for index in range(12))
SEQ = 16


def chain(length: int, seed: int) -> str:
    """Words in a ring, now and then two steps further: a text whose next word is nearly certain."""
    generator = np.random.default_rng(seed)
    place, words = 0, []
    for _ in range(length):
        words.append(WORDS[place])
        place = (place + (2 if generator.random() < 0.1 else 1)) % len(WORDS)
    return " ".join(words)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-opt")
    tokenizer = encoders.word_tokenizer("roberta", WORDS, 64)
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        dropout=0.0,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    )
    model = OPTForCausalLM(config)
    ids = torch.tensor(tokenizer(chain(SEQ * 32, seed=1), add_special_tokens=False)["input_ids"]).view(32, SEQ)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "chain.txt"
    path.write_text(chain(1200, seed=2))
    return path


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> models.LoadedModel:
    return models.load(str(checkpoint), head="causal-lm")


@pytest.fixture(scope="module")
def task(model: models.LoadedModel, file: Path) -> tasks.Task:
    return tasks.load("text", model, data=str(file), seq=SEQ)


def test_perplexity_is_that_of_the_models_own_loss(model: models.LoadedModel, task: Any) -> None:
    reference = tasks.evaluate(task, model.module, 4, SEQ, 8)
    ids = torch.tensor([window.ids for window in task.examples(8)])
    loss = model.module.backbone(input_ids=ids, labels=ids).loss
    judged = task.judge(reference, reference)
    assert judged.others["perplexity"] == pytest.approx(math.exp(float(loss)), rel=1e-4)
    assert judged.others["perplexity"] < 3.0 < 1.0 / judged.chance  # it has learned the chain
    assert (judged.metric, judged.n, judged.flips, judged.sqnr_db) == ("token_probability", 8, 0.0, None)
    assert judged.value > judged.chance


def test_padding_does_not_matter_and_calibration_is_not_judged(model: models.LoadedModel, task: Any) -> None:
    assert tasks.check_padding_invariance(model, task, count=4) < 1e-3
    seen = {tuple(row.tolist()) for batch in task.calibration() for row in batch["input_ids"]}
    assert seen
    assert len(task.examples()) > 50
    assert sum(len(window.ids) for window in (*task.train, *task.held_out)) <= 1200


@pytest.mark.parametrize("recipe", ["sq-static", "sq-dynamic", "llm-int8"])
def test_recipes_quantize_causal_models(model: models.LoadedModel, task: Any, recipe: str) -> None:
    quantized = int8.quantize(model.module, recipe, task.calibration())
    assert len(int8.quantized_modules(quantized)) == 12  # two layers of six; the tied head stays
    reference = tasks.evaluate(task, model.module, 4, SEQ, 16)
    judged = task.judge(tasks.evaluate(task, quantized, 4, SEQ, 16), reference)
    assert judged.sqnr_db is not None and judged.sqnr_db > 15
    assert judged.others["perplexity"] == pytest.approx(judged.others["fp32_perplexity"], rel=0.2)


def named(checkpoint: Path, file: Path) -> sources.Sources:
    return sources.Sources({("tiny-opt", "text"): sources.Checkpoint(str(checkpoint))}, {"text": str(file)})


def test_outliers_of_a_causal_model(checkpoint: Path, file: Path) -> None:
    report = outlier_report.examine("tiny-opt", "text", 8, sources=named(checkpoint, file))
    assert (report.task, report.analysis.layers, report.analysis.hidden_size) == ("text", 2, 32)
    assert report.analysis.hidden_states == 6
    assert report.attention_mass is not None and 0.0 < report.attention_mass <= 1.0


@pytest.mark.slow
def test_a_run_judges_perplexity(checkpoint: Path, file: Path, tmp_path: Path) -> None:
    profile = matrix.Profile(
        name="causal",
        about="a test's",
        models=("tiny-opt",),
        recipes={"int8": ("fp32", "sq-dynamic")},
        isas=("native",),
        scenarios=(matrix.Scenario.parse(f"offline:b2:s{SEQ}"),),
        task="text",
        limit=8,
        budget=matrix.Budget(rounds=2, slice_s=0.02, min_iterations=2, max_iterations=10, warmup_s=0.3),
    )
    store = Store(tmp_path)
    options = runner.RunOptions(profile, sources=named(checkpoint, file))
    assert runner.run(options, store).counts["ok"] == 2
    for record in store.load().records:
        assert record.accuracy is not None
        assert record.accuracy.others["perplexity"] < 3.5


def test_texts_come_from_files_and_folders_and_must_be_long_enough(
    model: models.LoadedModel, file: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.txt").write_text(chain(40, seed=3))
    (tmp_path / "test.txt").write_text(chain(80, seed=4))
    found: Any = tasks.load("text", model, data=str(tmp_path), seq=SEQ)
    assert (len(found.train), len(found.held_out)) == (2, 5)
    with pytest.raises(AssetError, match="less than one window"):
        tasks.load("text", model, data=str(tmp_path), seq=64)
    with pytest.raises(UsageError, match="--sources"):
        tasks.load("text", model, seq=SEQ)


def test_perplexity_of_certain_tokens_is_one() -> None:
    assert text.perplexity(np.zeros((2, 3, 2), dtype=np.float32)) == 1.0
    even = np.full((2, 3, 2), math.log(0.25), dtype=np.float32)
    assert text.perplexity(even) == pytest.approx(4.0)
