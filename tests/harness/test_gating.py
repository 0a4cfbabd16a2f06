"""The gate over real stores: which baseline, which exit code, what is shown."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from judged import accuracy, cell, keep, record, run
from rich.console import Console

from harness import gating
from harness.errors import AssetError, UsageError
from harness.records import Record, Store
from harness.verdicts import Verdict

CELLS = (cell(), cell("sq-dynamic"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


def measured(store: Store, run_id: str, time_s: float = 0.1, *, cells: Any = CELLS, **other: Any) -> None:
    """Keep a run of ``cells``; runs are ordered by the number at the end of their id."""
    finished = other.pop("finished", True)
    started_at = 1000.0 * float(run_id.rsplit("-", 1)[1])
    keep(store, run([record(one, time_s) for one in cells], run_id, finished, started_at=started_at, **other))


def speed_of(report: gating.GateReport, where: Any = CELLS[0]) -> Verdict:
    return next(one for one in report.verdicts if one.metric == "speed" and one.cell_key == where.key)


# --- which baseline ---------------------------------------------------------------------------------------------------


def test_the_first_run_has_no_baseline_and_passes(store: Store) -> None:
    measured(store, "run-1")
    report = gating.gate(store)
    assert (report.exit_code, report.outcome, report.baseline_run) == (0, "pass", None)
    assert speed_of(report).reason == "no baseline"
    assert any("no baseline" in note for note in report.notes)


def test_a_slower_run_alarms_until_it_is_accepted(store: Store) -> None:
    measured(store, "run-1")
    for number in (2, 3, 4):
        measured(store, f"run-{number}", 0.125)
        report = gating.gate(store)
        assert report.exit_code == 1
        assert report.baseline_run == "run-1", "a run that failed the gate is no baseline for the next"
    gating.accept(store, "run-4")
    assert gating.gate(store).exit_code == 0, "the accepted run itself"
    measured(store, "run-5", 0.125)
    report = gating.gate(store)
    assert (report.exit_code, report.baseline_run) == (0, "run-4")


def test_the_newest_run_that_passed_is_the_baseline(store: Store) -> None:
    measured(store, "run-1", 0.1)
    measured(store, "run-2", 0.08)
    measured(store, "run-3", 0.1)
    report = gating.gate(store)
    assert (report.exit_code, report.baseline_run) == (1, "run-2")
    assert gating.gate(store, "run-2").baseline_run == "run-1", "only earlier runs count"


def test_an_accepted_run_stays_the_baseline_so_slow_losses_add_up(store: Store) -> None:
    measured(store, "run-1")
    gating.accept(store, "run-1")
    found = []
    for number in range(2, 6):
        measured(store, f"run-{number}", 0.1 * 1.04**number / 1.04)
        found.append(gating.gate(store).exit_code)
    assert found == [0, 0, 1, 1]
    assert gating.gate(store).baseline_run == "run-1"


def test_the_run_accepted_last_wins_and_later_runs_do_not_count(store: Store) -> None:
    for number in (1, 2, 3):
        measured(store, f"run-{number}", 0.1)
    store.accept("run-3", now=1.0)
    store.accept("run-1", now=2.0)
    measured(store, "run-4")
    assert gating.gate(store).baseline_run == "run-1"
    store.accept("run-4", now=3.0)
    assert gating.gate(store, "run-2").baseline_run == "run-1"


@pytest.mark.parametrize(
    "unfit",
    [{"finished": False}, {"invalid_reason": "load 9"}, {"fingerprint": "host-b"}, {"cells": ()}],
)
def test_runs_that_prove_nothing_are_no_baseline(store: Store, unfit: dict[str, Any]) -> None:
    measured(store, "run-1", 0.01, **unfit)
    measured(store, "run-2")
    report = gating.gate(store)
    assert (report.exit_code, report.baseline_run) == (0, None)


def test_a_run_whose_accuracy_failed_is_no_baseline(store: Store) -> None:
    keep(store, run([record(time_s=0.2, accuracy=accuracy(0.6))], "run-1", started_at=1.0))
    measured(store, "run-2")
    assert gating.gate(store).baseline_run is None


def test_a_narrow_run_does_not_blind_the_gate(store: Store) -> None:
    measured(store, "run-1")
    measured(store, "run-2", cells=CELLS[1:], arguments=("run", "--recipes", "sq-dynamic"))
    measured(store, "run-3", 0.125)
    report = gating.gate(store)
    assert report.exit_code == 1
    assert report.baseline_run == "run-2"
    assert speed_of(report, CELLS[0]).baseline_run == "run-1"
    assert speed_of(report, CELLS[1]).baseline_run == "run-2"


def test_accepting_a_narrow_run_accepts_what_it_no_longer_measures(store: Store) -> None:
    measured(store, "run-1")
    measured(store, "run-2", cells=CELLS[:1])
    assert gating.gate(store).exit_code == 2, "a gated cell is missing"
    gating.accept(store, "run-2")
    assert gating.gate(store).exit_code == 0
    measured(store, "run-3", cells=CELLS[:1])
    assert gating.gate(store).exit_code == 0


def test_a_cell_younger_than_the_accepted_run_is_compared_all_the_same(store: Store) -> None:
    measured(store, "run-1", cells=CELLS[:1])
    gating.accept(store, "run-1")
    measured(store, "run-2")
    measured(store, "run-3", 0.125, cells=CELLS[1:], arguments=("run", "--recipes", "sq-dynamic"))
    report = gating.gate(store)
    assert (report.exit_code, report.baseline_run) == (1, "run-1")
    assert speed_of(report, CELLS[1]).baseline_run == "run-2"


def test_an_explicit_baseline_is_obeyed(store: Store) -> None:
    measured(store, "run-1", 0.05)
    measured(store, "run-2", 0.1)
    measured(store, "run-3", 0.1)
    gating.accept(store, "run-2")
    report = gating.gate(store, "run-3", "run-1")
    assert (report.exit_code, report.baseline_run) == (1, "run-1")


def test_a_baseline_from_another_host_is_refused_in_one_line(store: Store) -> None:
    measured(store, "run-1", fingerprint="host-b", host={"cpu_model": "B"})
    measured(store, "run-2")
    with pytest.raises(UsageError) as caught:
        gating.gate(store, baseline_id="run-1")
    text = str(caught.value)
    assert "another host" in text and "cpu_model: B against A" in text and "\n" not in text
    assert caught.value.exit_code == 64


def test_a_disturbed_or_unknown_baseline_is_refused(store: Store) -> None:
    measured(store, "run-1", invalid_reason="load 9")
    measured(store, "run-2")
    with pytest.raises(UsageError, match="load 9"):
        gating.gate(store, baseline_id="run-1")
    with pytest.raises(AssetError, match="run-7"):
        gating.gate(store, baseline_id="run-7")


def test_what_cannot_be_compared_with_cannot_be_accepted(store: Store) -> None:
    measured(store, "run-1", invalid_reason="load 9")
    measured(store, "run-2", cells=())
    for run_id, words in (("run-1", "load 9"), ("run-2", "no cell")):
        with pytest.raises(UsageError, match=words):
            gating.accept(store, run_id)
    measured(store, "run-3")
    assert gating.accept(store, "latest") == "run-3"
    assert store.accepted() == ["run-3"]


def test_a_disturbed_run_that_was_marked_all_the_same_is_passed_over(store: Store) -> None:
    measured(store, "run-1")
    measured(store, "run-2", 0.2, invalid_reason="load 9")
    store.accept("run-1", now=1.0)
    store.accept("run-2", now=2.0)
    measured(store, "run-3")
    assert gating.gate(store).baseline_run == "run-1"


def test_an_empty_store_says_what_to_do(store: Store) -> None:
    with pytest.raises(AssetError, match="harness run"):
        gating.gate(store)


def test_a_damaged_neighbour_is_noted_and_does_not_fail_the_run(store: Store) -> None:
    measured(store, "run-1")
    (store.root / "runs" / "run-0.jsonl").write_bytes(b"\x00garbage\n")
    report = gating.gate(store)
    assert report.exit_code == 0
    assert any("run-0" in note for note in report.notes)


def test_a_file_cut_short_is_read_and_is_no_pass(store: Store) -> None:
    measured(store, "run-1")
    path = store.root / "runs" / "run-1.jsonl"
    path.write_bytes(path.read_bytes()[:-200])
    report = gating.gate(store)
    assert report.exit_code == 2
    assert report.run.records, "what was measured is still there"


# --- stored records, damaged ------------------------------------------------------------------------------------------


def damage(store: Store, run_id: str, change: Any) -> None:
    """Change every record of a stored run, as JSON."""
    path = store.root / "runs" / f"{run_id}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for data in lines:
        if "cell" in data:
            change(data)
    path.write_text("".join(json.dumps(data) + "\n" for data in lines))


def slow_down(data: Any) -> None:
    if data["cell"]["recipe"] == "sq-dynamic":
        for one in data["timing"]["rounds"]:
            one["samples_s"] = [sample / 0.8 for sample in one["samples_s"]]


def unfuse(data: Any) -> None:
    data["evidence"]["fused_linears"] -= 1


def spoil(data: Any) -> None:
    data["accuracy"].update(value=0.69, delta=-0.042)


def lose(data: Any) -> None:
    data["accuracy"] = None


def break_it(data: Any) -> None:
    data.update(status="failed", reason="the worker died")


def touch_nothing(data: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        (touch_nothing, 0, None),
        (slow_down, 1, "sq-dynamic"),
        (spoil, 1, "accuracy"),
        (break_it, 2, "the worker died"),
        (unfuse, 2, "35 of 36"),
        (lose, 2, "no accuracy"),
    ],
)
def test_stored_records_that_were_damaged(store: Store, change: Any, code: int, named: str | None) -> None:
    measured(store, "run-1")
    measured(store, "run-2")
    damage(store, "run-2", change)
    report = gating.gate(store)
    assert report.exit_code == code
    lines = gating.failure_lines(report)
    assert bool(lines) == (code != 0)
    assert named is None or any(named in line for line in lines)


# --- how it is shown --------------------------------------------------------------------------------------------------


@pytest.fixture
def slow(store: Store) -> gating.GateReport:
    measured(store, "run-1")
    torchao = cell(engine="torchao")
    records: list[Record] = [record(torchao, accuracy=accuracy(0.6, flips=0.3)), record(time_s=0.125), record(CELLS[1])]
    keep(store, run(records, "run-2", started_at=2000.0))
    return gating.gate(store)


def printed(report: gating.GateReport, width: int = 200, **options: Any) -> str:
    return gating.as_text(report, Console(file=io.StringIO(), width=width), **options)


def test_the_table_shows_every_verdict_with_numbers_and_the_gated_failure_first(slow: gating.GateReport) -> None:
    text = printed(slow)
    rows = [line for line in text.splitlines() if line.startswith("minilm/")]
    assert rows[0].startswith("minilm/int8/sq-static/amx/offline:b8:s128@reviews") and "regression" in rows[0]
    assert sum("torchao" in row and " no " in row for row in rows) >= 3
    assert text.rstrip().splitlines()[-1].startswith("gate: regression (exit 1): run run-2 against run run-1")


def test_the_table_has_whole_commands_even_in_a_narrow_log(slow: gating.GateReport) -> None:
    key = "minilm/int8/sq-static/amx/offline:b8:s128@reviews"
    lines = [line.strip() for line in printed(slow, width=80).splitlines()]
    assert f"reproduce: harness replay {key}" in lines
    assert f"profile: harness replay {key} --profile" in lines
    assert "accept: harness accept run-2" in lines
    elsewhere = [line.strip() for line in printed(slow, results="my results").splitlines()]
    assert "accept: harness accept run-2 --results 'my results'" in elsewhere
    assert f"reproduce: harness replay {key}" in elsewhere, "a replay reads no store"


def test_lines_with_commands_are_never_broken(store: Store) -> None:
    where = cell(model="m" * 250)
    keep(store, run([record(where, status="failed", reason="r" * 300)], "run-1", started_at=1.0))
    lines = printed(gating.gate(store), width=80).splitlines()
    assert f"  reproduce: harness replay {where.key}" in lines
    assert any("r" * 300 in line for line in lines)


def test_the_table_can_be_printed_as_one_thing(slow: gating.GateReport) -> None:
    stream = io.StringIO()
    Console(file=stream, width=200).print(gating.table(slow))
    assert stream.getvalue().rstrip().splitlines()[-1] == gating.headline(slow)


def test_what_is_not_gated_has_no_failure_line(slow: gating.GateReport) -> None:
    assert not any("torchao" in line for line in gating.failure_lines(slow))


def test_json_is_plain_and_complete(slow: gating.GateReport) -> None:
    data = json.loads(json.dumps(gating.to_json(slow), allow_nan=False))
    assert (data["run_id"], data["baseline_run"], data["exit_code"], data["outcome"]) == (
        "run-2",
        "run-1",
        1,
        "regression",
    )
    assert len(data["verdicts"]) == len(slow.verdicts)
    worst = next(one for one in data["verdicts"] if one["gated"] and one["outcome"] == "regression")
    assert worst["metric"] == "speed" and worst["value"] == pytest.approx(0.8) and worst["limit"] == 0.9
    assert worst["commands"]["accept"] == "harness accept run-2"


def test_markdown_is_a_table_that_hostile_text_cannot_leave(store: Store) -> None:
    evil = "a|b\n<script>alert(1)</script> `x` *y*"
    keep(store, run([record(status="failed", reason=evil), record(CELLS[1])], "run-1", started_at=1.0))
    text = gating.to_markdown(gating.gate(store))
    assert text.startswith(gating.MARKDOWN_MARKER)
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert {line.replace("\\|", "").count("|") for line in table} == {8}
    assert "| **failed** |" in text
    assert "\\<script\\>" in text.split("```")[0] and "<script>" not in text.split("```")[0]


def test_markdown_of_many_lines_is_cut_with_notice(slow: gating.GateReport) -> None:
    assert "more lines are left out" in gating.to_markdown(slow, most=2)


def test_every_outcome_has_a_look() -> None:
    assert set(gating.OUTCOMES) == {0, 1, 2, 3, 4}
    assert set(gating.OUTCOMES.values()) <= set(gating._STYLES)
