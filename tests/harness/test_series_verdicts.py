"""The gate over stores with a history: what the newest run's cells are held against."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from judged import accuracy, cell, keep, record, run

from harness import gating, history, verdicts
from harness.history import ITERATION_S
from harness.known_changes import KnownChange
from harness.records import Store
from harness.verdicts import Verdict

CELLS = (cell(), cell("sq-dynamic"), cell("sq-dynamic", scenario="single:s128"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


def noise(nights: int, cells: int = len(CELLS), seed: int = 0) -> np.ndarray:
    """(nights, cells) factors around 1."""
    return np.exp(np.random.default_rng(seed).standard_t(3, (nights, cells)) * 0.01 / math.sqrt(3))


def measured(store: Store, costs: np.ndarray, *, first: int = 0, commit: str = "c0ffee", **other: Any) -> None:
    """Keep a run for each row of ``costs``, iteration times in tenths of a second."""
    for number, row in enumerate(costs, start=first):
        records = [record(one, 0.1 * cost) for one, cost in zip(CELLS, row, strict=True)]
        keep(store, run(records, f"run-{number:03d}", started_at=float(number), commit=commit, **other))


def judged(store: Store, metric: str = "speed", run_id: str = "latest", **known: Any) -> dict[str, Verdict]:
    found = gating.gate(store, run_id, known=known.get("known", ())).verdicts
    return {one.cell_key: one for one in found if one.metric == metric}


def test_a_night_that_strays_passes_and_is_said(store: Store) -> None:
    costs = noise(30)
    costs[-1, 0] *= 1.25
    measured(store, costs)
    report = gating.gate(store, known=())
    speed = {one.cell_key: one for one in report.verdicts if one.metric == "speed"}[CELLS[0].key]
    assert (report.exit_code, speed.outcome) == (0, "pass")
    assert speed.value == pytest.approx(0.8, abs=0.02) and "one run alone decides nothing" in speed.reason
    assert any("1 cells lie off their level" in note and "harness run" in note for note in report.notes)


def test_the_third_night_in_a_row_is_a_regression_until_it_is_accepted(store: Store) -> None:
    costs = noise(60)
    costs[30:, 0] *= 1.06
    measured(store, costs[:32])
    assert gating.gate(store, known=()).exit_code == 0
    measured(store, costs[32:33], first=32)
    report = gating.gate(store, known=())
    assert report.exit_code == 1
    (bad,) = [one for one in report.verdicts if not one.good]
    assert (bad.cell_key, bad.metric) == (CELLS[0].key, "speed")
    assert "slower since run run-030" in bad.reason
    assert [purpose for purpose, _ in verdicts.commands(bad, "run-032")] == ["reproduce", "profile", "accept"]
    measured(store, costs[33:50], first=33)
    assert gating.gate(store, known=()).exit_code == 1, "every night"
    gating.accept(store, "run-049")
    assert gating.gate(store, known=()).exit_code == 0
    measured(store, costs[50:], first=50)
    assert gating.gate(store, known=()).exit_code == 0, "the accepted speed is the new level"


def test_a_gain_that_nobody_explained_is_reported_and_fails_nothing(store: Store) -> None:
    costs = noise(34)
    costs[30:, 1] *= 0.9
    measured(store, costs)
    report = gating.gate(store, known=())
    assert report.exit_code == 0
    speed = {one.cell_key: one for one in report.verdicts if one.metric == "speed"}
    assert speed[CELLS[1].key].outcome == "improvement"
    assert any("not explained" in note and CELLS[1].key in note for note in report.notes)


def test_a_short_history_keeps_to_the_baseline(store: Store) -> None:
    costs = noise(10)
    costs[-1, 0] *= 1.2
    measured(store, costs)
    found = judged(store)[CELLS[0].key]
    assert (found.outcome, found.baseline_run) == ("regression", "run-008")
    measured(store, costs[-1:], first=10)
    assert "the level of 10 runs since run-000" in judged(store)[CELLS[0].key].reason


def test_a_named_baseline_is_all_that_counts(store: Store) -> None:
    costs = noise(30)
    costs[-1, 0] *= 1.25
    measured(store, costs)
    report = gating.gate(store, baseline_id="run-003", known=())
    assert report.exit_code == 1 and report.baseline_run == "run-003"


def test_runs_that_must_not_be_used_make_no_level(store: Store) -> None:
    measured(store, noise(12))
    bad = [record(one, 0.01, accuracy=accuracy(0.6)) for one in CELLS]
    for number in range(12, 24):
        keep(store, run(bad, f"run-{number:03d}", started_at=float(number)))
    measured(store, noise(12) * 0.1, first=24, invalid_reason="load 9")
    measured(store, noise(12) * 0.1, first=36, fingerprint="host-b")
    measured(store, noise(1), first=48)
    found = judged(store)[CELLS[0].key]
    assert found.outcome == "pass" and "the level of 12 runs" in found.reason


def test_a_cell_whose_accuracy_failed_shows_no_gain(store: Store) -> None:
    measured(store, noise(20))
    records = [record(one, 0.05, accuracy=accuracy(0.6)) for one in CELLS]
    keep(store, run(records, "run-020", started_at=20.0))
    report = gating.gate(store, known=())
    speeds = [one for one in report.verdicts if one.metric in ("speed", "geomean")]
    assert report.exit_code == 1
    assert all(one.value is None and "not shown" in one.reason for one in speeds)
    assert not any("faster" in note for note in report.notes)


def test_slow_drift_is_caught_although_every_night_passed(store: Store) -> None:
    costs = noise(130) * (1 + 0.0003 * np.arange(130))[:, None]
    measured(store, costs)
    store.accept("run-010")
    store.accept("run-100")
    report = gating.gate(store, known=())
    drifts = [one for one in report.verdicts if one.metric == "drift"]
    assert report.exit_code == 1 and drifts and all(one.outcome == "regression" for one in drifts)
    command = dict(verdicts.commands(drifts[0], "run-129"))["accept"]
    assert command == "harness accept run-129 --pin"
    gating.accept(store, "run-129", pin=True)
    assert not [one for one in gating.gate(store, known=()).verdicts if one.metric == "drift"]


def test_a_known_change_is_a_new_level_and_is_listed(store: Store) -> None:
    costs = noise(60)
    costs[30:] *= 1.08
    measured(store, costs[:30])
    measured(store, costs[30:], first=30, commit="abcdef1234")
    assert gating.gate(store, known=()).exit_code == 1
    meant = KnownChange("minilm/int8/*", "speed", "abcdef1", "exact GELU", "A. Author")
    report = gating.gate(store, known=(meant,))
    assert report.exit_code == 0
    assert [(one.first_run, len(one.keys)) for one in report.known] == [("run-030", 3)]
    text = "\n".join(gating.closing_lines(report))
    assert "known change: minilm/int8/* speed since commit abcdef1 (run run-030): exact GELU (A. Author)" in text
    assert "exact GELU" in gating.to_markdown(report)
    assert gating.to_json(report)["known_changes"][0]["first_run"] == "run-030"
    elsewhere = dataclasses.replace(meant, series="bert-large/*")
    assert gating.gate(store, known=(elsewhere,)).exit_code == 1


def test_a_geometric_mean_has_a_verdict_of_its_own(store: Store) -> None:
    costs = noise(40)
    costs[-4:, 1:] *= 1.08
    measured(store, costs)
    found = judged(store, "geomean")
    assert set(found) == {"minilm/int8/sq-dynamic"}, "one cell is no group"
    group = found["minilm/int8/sq-dynamic"]
    assert group.outcome == "regression" and group.gated
    assert group.value == pytest.approx(1 / 1.08, abs=0.02)


def test_a_young_group_is_held_against_the_baseline(store: Store) -> None:
    measured(store, np.ones((1, 3)))
    measured(store, np.array([[1.0, 1.2, 1.1]]), first=1)
    group = judged(store, "geomean")["minilm/int8/sq-dynamic"]
    assert group.value == pytest.approx(1 / math.sqrt(1.2 * 1.1)) and group.outcome == "regression"


def test_commands_name_the_sources_of_the_run(store: Store) -> None:
    arguments = ("run", "--profile", "quick", "--sources", "my checkpoints.toml")
    costs = noise(33)
    costs[30:] *= 1.1
    measured(store, costs, arguments=arguments)
    report = gating.gate(store, known=())
    found = [dict(verdicts.commands(one, "run-032")) for one in report.verdicts if not one.good]
    assert found
    for each in found:
        assert "--sources 'my checkpoints.toml'" in each["reproduce"]
        assert each["profile"] == each["reproduce"] + " --profile"


def test_the_word_told_by_the_index_is_the_word_on_the_records(store: Store) -> None:
    """``baselines.passed`` decides from the index what ``verdicts.judge`` decides from the stored run."""
    from harness import baselines

    rng = np.random.default_rng(5)
    for number in range(40):
        chosen = [one for one in CELLS if rng.random() < 0.9] or list(CELLS[:1])
        records = []
        for one in chosen:
            made = record(one, 0.1 * float(np.exp(rng.normal(0, 0.06))))
            what = rng.random()
            if what < 0.05:
                made = record(one, status="failed", reason="killed", timing=record().timing)
            elif what < 0.1:
                made = record(one, status="skipped", reason="no such thing")
            elif what < 0.15:
                made = record(one, accuracy=accuracy(0.6))
            elif what < 0.2:
                latency = dataclasses.replace(made.timing, throughput=made.timing.throughput * 0.85)  # type: ignore[operator]
                made = dataclasses.replace(made, timing=latency)
            records.append(made)
        arguments = ("run", "--recipes", "sq-dynamic") if rng.random() < 0.2 else ("run", "--profile", "quick")
        kept = run(
            records,
            f"run-{number:03d}",
            finished=bool(rng.random() < 0.95),
            started_at=float(number),
            arguments=arguments,
        )
        keep(store, kept)
    past = history.read(store)
    before: verdicts.Baseline | None = None
    for number, entry in enumerate(past.entries):
        so_far = history.History(past.entries[: number + 1])
        chosen_by_index = baselines.choose(store, so_far)
        loaded = store.load(entry.run_id)
        by_records = verdicts.exit_code(verdicts.judge(loaded, before), loaded) == 0
        assert baselines.passed(entry, chosen_by_index.where) == by_records
        if by_records:
            own = verdicts.Baseline.of(loaded)
            old = before or verdicts.Baseline({}, {})
            before = verdicts.Baseline({**old.records, **own.records}, {**old.headers, **own.headers})
    assert before is not None and 5 < len(before.headers) < 35


def test_the_report_is_strict_json_and_a_table(store: Store) -> None:
    costs = noise(33)
    costs[30:] *= 1.1
    measured(store, costs)
    report = gating.gate(store, known=())
    assert json.loads(json.dumps(gating.to_json(report), allow_nan=False))["exit_code"] == 1
    assert "geomean" in gating.to_markdown(report)
    assert history.read(store).series(CELLS[0].key, ITERATION_S).values[-1] == pytest.approx(0.11, abs=0.01)
