"""The load benchmark itself, on a store of a few nights: it runs, times every step, and leaves the store usable."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import scale


def test_every_step_is_timed_and_the_store_can_be_used_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    sizes = ["--runs", "3", "--cells", "4", "--store", str(store), "--no-report"]
    scale.main(sizes)
    out = capsys.readouterr().out
    assert [line.rsplit("  ")[0].strip() for line in out.splitlines()][1:2] and "gate, one more run" in out
    assert len(list((store / "runs").glob("*.jsonl"))) == 4, "the run that was kept aside has come"
    assert len(list((store / "index").glob("*/*.json"))) == 4
    scale.main(sizes)
    assert "index" in capsys.readouterr().out


def test_a_broken_bound_is_told() -> None:
    assert not scale.Step("gate", 10.1, 1.0).kept and scale.Step("gate", 9.9, 30.0).kept
    assert scale.Step("index", 1e6, 1e6).kept, "told, not judged"


def test_a_command_that_fails_ends_the_benchmark() -> None:
    with pytest.raises(SystemExit, match="ended with 64"):
        scale.timed("gate", ["-m", "harness", "gate", "--nonsense"], (0,))
