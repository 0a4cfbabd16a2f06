"""The paper's values beside a run's: the table, and the profile ``paper`` from end to end on tiny checkpoints."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
import tiny_heads
from judged import accuracy, cell, record, run
from rich.console import Console

from harness import assets, cli, matrix, paper
from harness.matrix import Budget
from harness.records import Record, Run, Store

VALUES = assets.catalog("paper")


def printed(found: Run) -> str:
    console = Console(file=io.StringIO(), width=250)
    console.print(paper.as_table(found))
    return console.file.getvalue()  # type: ignore[attr-defined]


def of_paper(recipe: str = "sq-static", isa: str = "amx", model: str = "bert-large", task: str = "squad") -> Record:
    scores = {"exact_match": 0.8712, "fp32_exact_match": 0.8731}
    if task == "squad":
        judged = accuracy(0.9301, 0.9315, metric="f1", others=scores, chance=0.0)
    else:
        judged = accuracy(0.8601, 0.8602)
    return record(cell(recipe, isa, model=model, task=task), accuracy=judged)


def fields(one: Record, speedup: float | None = 4.0) -> dict[str, str]:
    return dict(zip(paper.COLUMNS, paper.row(one, speedup, VALUES), strict=True))


def test_our_values_are_percent_and_points() -> None:
    found = fields(of_paper())
    assert (found["FP32"], found["INT8"]) == ("F1 93.15, EM 87.31", "F1 93.01, EM 87.12")
    assert found["loss"] == "0.14" and found["speed-up"] == "4.00x"
    assert fields(of_paper(task="mnli"))["INT8"] == "86.01"
    same = record(cell(model="bert-large", task="mnli"), accuracy=accuracy(0.86, 0.86))
    assert fields(same)["loss"] == "0.00"


@pytest.mark.parametrize(
    ("recipe", "isa", "model", "speedup"),
    [
        ("sq-static", "amx", "bert-large", "5.82x"),
        ("sq-dynamic", "amx", "bert-large", "5.02x"),
        ("sq-static", "vnni", "bert-large", "2.58x"),
        ("sq-dynamic", "vnni", "bert-large", "1.9-2.6x"),  # the text gives the range alone
        ("sq-static", "amx", "xlmr-base", "4.2-5.8x"),
        ("sq-static", "avx2", "bert-large", "-"),  # no machine of the paper
        ("static", "amx", "bert-large", "-"),  # no method of the paper
        ("sq-static", "amx", "minilm", "-"),  # no model of the paper
    ],
)
def test_the_papers_speedup_is_the_closest_that_its_text_gives(recipe: str, isa: str, model: str, speedup: str) -> None:
    assert fields(of_paper(recipe, isa, model))["paper's speed-up"] == speedup


def test_scores_that_the_text_lacks_are_dashes_and_can_be_added() -> None:
    found = fields(of_paper())
    assert (found["paper's FP32"], found["paper's INT8"], found["paper's loss"]) == ("-", "-", "< 1")
    added = {"model": "bert-large", "task": "squad", "recipe": "sq-static", "fp32": 90.5, "int8": 90.25}
    row = paper.row(of_paper(), 4.0, {**VALUES, "scores": [added]})
    assert dict(zip(paper.COLUMNS, row, strict=True))["paper's loss"] == "0.25"
    assert fields(of_paper(model="minilm", task="reviews"))["paper's loss"] == "-"


def test_only_quantized_cells_are_rows_and_speed_needs_accuracy() -> None:
    ruined = record(cell("sq-dynamic", model="bert-large", task="mnli"), accuracy=accuracy(0.60, 0.86))
    baseline = record(cell("fp32", model="bert-large", task="mnli"))
    text = printed(run([baseline, of_paper(task="mnli"), ruined]))
    assert all(name in text for name in paper.COLUMNS) and "arXiv 2608.18182" in text
    lines = [line for line in text.splitlines() if "bert-large" in line]
    assert len(lines) == 2
    assert "4.00x" in lines[0] and "4.00x" not in lines[1] and "26.00" in lines[1]


def test_the_catalog_names_the_profiles_models_and_recipes() -> None:
    profile = matrix.get_profile("paper")
    assert tuple(VALUES["models"]) == profile.models
    assert set(VALUES["recipes"]) == set(profile.gated)


# --- the profile, from end to end ------------------------------------------------------------------------------------

BUDGET = Budget(rounds=2, slice_s=0.05, min_iterations=3, max_iterations=20, warmup_s=0.5)
FAMILY = {"bert-large": "bert", "distilbert-base": "distilbert", "xlmr-base": "xlm-roberta"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_profile_runs_on_tiny_checkpoints_of_all_families(
    tiny: tiny_heads.TinyHeads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INT8_ASSETS", str(tiny.root / "assets"))
    lines = ["[tasks]", *(f'{task} = "{tiny.data(task)}"' for task in ("squad", "mnli"))]
    for model, family in FAMILY.items():
        lines += [f"[models.{model}]", *(f'{t} = "{tiny.checkpoint(family, t)}"' for t in ("squad", "mnli"))]
    brief = dataclasses.replace(matrix.get_profile("paper"), budget=BUDGET)
    monkeypatch.setattr(matrix, "get_profile", {"paper": brief}.__getitem__)
    (tmp_path / "sources.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    results = ["--results", str(tmp_path / "results")]
    asked = ["--profile", "paper", "--sources", str(tmp_path / "sources.toml"), "--isa", "native"]
    size = ["--engines", "int8", "--recipes", "fp32,sq-static,sq-dynamic", "--scenarios", "offline:b4:s64"]
    assert cli.main(["run", *asked, *size, "--limit", "90", *results]) == 0
    found = Store(tmp_path / "results").load("latest")
    assert {(one.cell.model, one.cell.task) for one in found.records} == {
        (model, task) for model in FAMILY for task in ("squad", "mnli")
    }
    assert len(found.records) == 18
    for one in found.records:
        assert one.status == "ok" and one.cell.weights == "real" and one.cell.family == FAMILY[one.cell.model]
        assert one.accuracy is not None and one.accuracy.n == 90 and one.accuracy.fp32_value > 0.6
        assert one.accuracy.value > 0.95 * one.accuracy.fp32_value
        assert one.accuracy.metric == ("f1" if one.cell.task == "squad" else "accuracy")
        quantized = 0 if one.cell.recipe == "fp32" else 12
        assert one.evidence.quantized_linears == one.evidence.fused_linears == quantized  # heads stay as they are
    squad = next(one for one in found.records if one.cell.task == "squad" and one.cell.recipe == "fp32")
    assert squad.accuracy is not None and squad.accuracy.outputs is not None and squad.accuracy.flips == 0
    kept = Store(tmp_path / "results").outputs(squad.accuracy.outputs)
    assert kept["f1"].mean() == pytest.approx(squad.accuracy.value) and len(kept["answers"]) == 90
    capsys.readouterr()
    assert cli.main(["show", "--format", "paper", *results]) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in paper.COLUMNS)
    assert sum("sq-" in line and "offline:b4:s64" in line and "failed" not in line for line in table.splitlines()) == 12
