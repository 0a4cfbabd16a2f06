"""The verb ``python -m int8 quantize`` as a user types it, on a model saved by transformers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast

import int8

WORDS = ("[PAD]", "[UNK]", "a", "fine", "dull", "film", "with", "grace")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    BertModel(config).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    return folder


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "int8", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_quantize_writes_a_model_that_loads(model: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("a fine film\n\na dull film with grace\n" * 10)
    done = run("quantize", model, "--recipe", "sq-static", "--calibration", texts, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "out")
    assert "calibration batch 2 of 2" in done.stderr
    loaded = int8.load(tmp_path / "out", into=AutoModel.from_pretrained(model))
    assert len(int8.quantized_modules(loaded)) == 12
    assert loaded.int8_recipe.name == "sq-static"


def test_package_writes_one_file_that_serves(model: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("a fine film\na dull film with grace\n")
    done = run("quantize", model, "--recipe", "sq-static", "--calibration", texts, "--out", tmp_path, "--package")
    assert done.returncode == 0, done.stderr
    assert "12 of 12 linears fused" in done.stderr
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    batch = tokenizer(["a fine film with grace", "dull"], padding=True, return_tensors="pt")
    expected = int8.load(tmp_path, into=AutoModel.from_pretrained(model))(**batch).last_hidden_state
    package = int8.load_package(next(tmp_path.glob("model-*.pt2")))
    torch.testing.assert_close(package(**batch)["last_hidden_state"], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--recipe", "sq-statik"), 1, "did you mean sq-static"),
        (("--recipe", "sq-static"), 1, "--calibration FILE"),
        (("--recipe", "sq-static", "--calibration", "nowhere.txt"), 1, "cannot read nowhere.txt"),
        (("--colour", "red"), 64, "No such option"),
    ],
)
def test_bad_input_is_one_clear_line(
    model: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    done = run("quantize", model, "--out", tmp_path / "out", *arguments)
    assert (done.returncode, done.stderr.count("error:")) == (code, 1), done.stderr
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


def test_build_prints_the_library(tmp_path: Path) -> None:
    done = run("build")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).suffix == ".so"
