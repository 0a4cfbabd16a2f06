from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import cli, product_times
from harness.errors import UsageError


def test_products_are_timed_apart_and_their_memory_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["products", "--sizes", "64", "--results", str(tmp_path)]) == 0
    assert "vector-wise" in capsys.readouterr().out
    (path,) = (tmp_path / "analyses").glob("products-*.json")
    data = json.loads(path.read_text())
    (size,) = data["sizes"]
    assert (size["inner"], size["outer"], data["tokens"]) == (64, 256, product_times.TOKENS)
    assert set(size["seconds"]) == {"float", "quantize", *product_times.RECIPES}
    assert all(seconds > 0 for seconds in size["seconds"].values())
    online = size["seconds"]["llm-int8"] - size["seconds"]["vectorwise"]
    assert size["decomposition_s"] == pytest.approx(online)
    held, weights = size["weight_bytes"], 64 * 256
    itemsize = 2 if data["float_dtype"] == "bf16" else 4
    assert held["float"] == itemsize * weights
    assert weights < held["vectorwise"] < 1.2 * weights
    # Fixed dimensions keep their six columns and where they are; found ones keep every column.
    assert held["llm-int8-offline"] - held["vectorwise"] == 6 * 256 * itemsize + 6 * 8
    assert held["llm-int8"] - held["vectorwise"] == itemsize * weights


def test_sizes_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="above 6"):
        product_times.check([4])
    assert cli.main(["products", "--sizes", "a"]) == cli.EXIT_USAGE
    assert "--sizes" in capsys.readouterr().err
