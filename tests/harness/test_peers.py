"""The table of other runtimes beside ours, and the goals: all from records made here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import samples
from rich.console import Console

from harness import matrix, peers
from harness.errors import UsageError
from harness.records import Cell, Evidence, Record, Run
from int8 import recipe as recipes

LARGE = "bert-large-4l"
OFFLINE = "offline:b8:s128"


def cell(engine: str, recipe: str, ms: float, isa: str = "amx", model: str = LARGE, **changes: Any) -> Record:
    where = Cell(model, engine, recipe, isa, changes.pop("scenario", OFFLINE), weights="synthetic")
    record = samples.record(seconds=ms / 1e3, cell=where, accuracy=None, speedup=None)
    return dataclasses.replace(record, evidence=Evidence(fp32_cosine=0.9991), **changes)


def run(*records: Record) -> Run:
    return Run(samples.header(), records, finished=True)


def printed(*records: Record, roofline: dict[str, Any] | None = None) -> str:
    console = Console(width=300, color_system=None)
    with console.capture() as captured:
        console.print(peers.as_table(run(*records), peers.load_goals(), roofline))
    return captured.get()


AMX = (
    cell("int8", "fp32", 400.0),
    cell("int8", "sq-static", 40.0),
    cell("int8", "sq-dynamic", 80.0),
    cell("torchao", "sq-static", 72.0),
    cell("openvino", "fp32", 366.0),
    cell("openvino", "sq-static", 48.0),
    cell("onnxruntime", "static", 150.0),
    cell("onnxruntime", "dynamic", 102.0),
)


def outcomes(*records: Record, roofline: dict[str, Any] | None = None) -> dict[str, peers.Judged]:
    return {one.text: one for one in peers.judge(run(*records), peers.load_goals(), roofline)}


def test_goals_are_judged_by_the_ratio_of_median_times() -> None:
    found = outcomes(*AMX)
    assert found["int8/sq-static over int8/fp32"].outcome == "met"  # 10x of 9x
    missed = found["int8/sq-static over openvino/sq-static"]
    assert (missed.outcome, missed.least) == ("missed", 1.3)
    assert missed.measured is not None and missed.measured.value == pytest.approx(1.2)
    assert found["int8/sq-static over torchao/sq-static"].outcome == "met"
    assert found["int8/sq-dynamic over int8/fp32"].outcome == "missed"  # 5x of 7.5x


def test_exactly_the_goal_is_met() -> None:
    pair = (cell("int8", "sq-static", 100.0, "vnni"), cell("openvino", "sq-static", 108.0, "vnni"))
    measured = outcomes(*pair)["int8/sq-static over openvino/sq-static"].measured
    assert measured is not None
    goal = dataclasses.replace(peers.load_goals().ratios[1], least={"vnni": measured.value})
    goals = dataclasses.replace(peers.load_goals(), ratios=(goal,))
    assert peers.judge(run(*pair), goals)[0].outcome == "met"


def test_a_missing_or_failed_cell_is_named_and_judges_nothing() -> None:
    failed = cell("openvino", "sq-static", 1.0, status="failed", reason="it broke")
    found = outcomes(cell("int8", "sq-static", 40.0), failed)
    over_fp32, over_openvino = (
        found["int8/sq-static over int8/fp32"],
        found["int8/sq-static over openvino/sq-static"],
    )
    assert (over_fp32.outcome, over_fp32.measured) == ("not measured", None)
    assert "int8/fp32 is not in the run" in str(over_fp32.reason)
    assert over_openvino.outcome == "not measured" and "it broke" in str(over_openvino.reason)
    text = printed(cell("int8", "sq-static", 40.0), failed)
    assert "failed: bert-large-4l/openvino/sq-static/amx/offline:b8:s128: it broke" in text
    assert "2 missed" not in text


def test_other_isas_have_ratios_and_no_goal() -> None:
    text = printed(*(dataclasses.replace(one, cell=dataclasses.replace(one.cell, isa="avx2")) for one in AMX))
    assert "no goal for avx2" in text
    assert "0 met, 0 missed" in text
    assert "not judged: goals for amx, vnni" in text
    assert "1.20x" in text


def test_the_table_shows_each_engines_fastest_quantized_cell_and_its_own_fp32() -> None:
    lines = peers.times_row((LARGE, OFFLINE, "amx"), peers.Cells(run(*AMX)))
    assert lines == (
        *(LARGE, OFFLINE, "amx"),
        *("400", "40", "80", "72 sq-static", "48 sq-static (366)", "102 dynamic", "-"),
        *("10.00x", "1.80x", "1.20x", "2.55x", "-"),
    )


def test_packages_stand_apart() -> None:
    package = dataclasses.replace(AMX[1], cell=dataclasses.replace(AMX[1].cell, deploy="aoti"))
    assert peers.Cells(run(package)).rows() == []


def test_each_quantized_cell_says_that_it_computed_the_model() -> None:
    text = printed(*AMX, samples.record())
    assert "bert-large-4l/onnxruntime/dynamic/amx/offline:b8:s128: cosine to eager FP32 0.99910" in text
    assert "minilm/int8/sq-static/vnni/offline:b8:s128@reviews: accuracy 0.7300 (-0.0020 against FP32)" in text
    assert "openvino/fp32/amx/offline:b8:s128: cosine" not in text


ROOFLINE = {
    "sections": [
        {"isa": "vnni", "scenario": OFFLINE, "recipes": []},
        {
            "isa": "amx",
            "scenario": OFFLINE,
            "recipes": [
                {"recipe": "fp32", "points": [{"m": 1024, "n": 4096, "k": 1024, "ops_per_s": 9e12, "peak": 1e13}]},
                {
                    "recipe": "sq-static",
                    "points": [
                        {"m": 1024, "n": 1024, "k": 1024, "ops_per_s": 9e12, "peak": 1e13},
                        {"m": 1024, "n": 4096, "k": 1024, "ops_per_s": 6e12, "peak": 1e13},
                    ],
                },
            ],
        },
    ]
}


def test_the_peak_goal_reads_the_hosts_roofline(tmp_path: Path) -> None:
    path = tmp_path / "analyses" / f"roofline-{LARGE}-{samples.header().fingerprint}.json"
    assert peers.roofline(tmp_path, run()) is None
    path.parent.mkdir()
    path.write_text(json.dumps(ROOFLINE), encoding="utf-8")
    goal = "linear M=1024 N=4096 K=1024 of the INT8 peak"
    found = outcomes(*AMX, roofline=dict(peers.roofline(tmp_path, run()) or {}))[goal]
    assert found.measured is not None
    assert (found.outcome, found.measured.value) == ("met", pytest.approx(0.6))
    without = outcomes(*AMX)[goal]
    assert without.outcome == "not measured" and "harness roofline" in str(without.reason)
    assert outcomes(cell("int8", "fp32", 1.0, "vnni"), roofline=ROOFLINE)[goal].outcome == "not measured"


def test_the_catalogs_goals_name_models_engines_and_recipes_that_exist() -> None:
    profile = matrix.get_profile("peers")
    for goal in peers.load_goals().ratios:
        assert set(goal.models) & set(profile.models)
        assert goal.scenario in map(str, profile.scenarios)
        for engine, recipe in (goal.ours, goal.over):
            assert recipe in profile.recipes[engine]
            assert recipes.get(recipe).name == recipe
        assert set(goal.least) == {"amx", "vnni"}


@pytest.mark.parametrize(
    "damage",
    [{"ours": "int8"}, {"least": {"sse": 1.0}}, {"wish": 1}],
    ids=["no recipe", "unknown ISA", "unknown field"],
)
def test_a_wrong_goal_is_a_usage_error(damage: dict[str, Any]) -> None:
    row = {"models": ["m"], "scenario": OFFLINE, "ours": "int8/fp32", "over": "int8/bf16", "least": {"amx": 1.0}}
    peak = {"model": "m", "scenario": OFFLINE, "recipe": "static", "m": 1, "n": 1, "k": 1, "least": {}}
    with pytest.raises(UsageError, match=r"goals\.toml"):
        peers.parse_goals({"ratio": [row | damage], "peak": peak})
