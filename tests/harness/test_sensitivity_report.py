from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import cli, sensitivity_report
from harness.errors import UsageError


def test_a_tiny_model_is_rated_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["sensitivity", "tiny-bert", "--task", "tiny-reviews", "--recipes", "static,sq-dynamic", "--limit", "16"]
    assert cli.main([*given, "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "attention.self.(query key value)" in printed.out
    assert "16 held-out texts" in printed.out
    data = json.loads((tmp_path / "analyses" / "sensitivity-tiny-bert.json").read_text())
    assert (data["model"], data["task"], data["texts"]) == ("tiny-bert", "tiny-reviews", 16)
    assert [one["recipe"] for one in data["recipes"]] == ["static", "sq-dynamic"]
    for one in data["recipes"]:
        assert len(one["groups"]) == 8  # two layers of four inputs
        assert sum(group["noise_share"] for group in one["groups"]) == pytest.approx(1.0)
        assert all(group["alone_db"] > one["total_db"] for group in one["groups"])


def test_recipes_without_one_format_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("fp32", "auto"):
        with pytest.raises(UsageError, match=name):
            sensitivity_report.check([name])
    assert cli.main(["sensitivity", "tiny-bert", "--recipes", "sq-statik"]) == cli.EXIT_USAGE
    assert "did you mean sq-static" in capsys.readouterr().err
