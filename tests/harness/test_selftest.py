"""The self-test's pure parts on drawn noise, and its recorded faults through the real store and gate."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from samples import header, record

from harness import faults, fingerprint, selftest
from harness.comparison import Pairs
from harness.errors import UsageError
from harness.records import Evidence, Store
from harness.selftest import Fault, Measured, Report, Series

CELL = "minilm/int8/sq-static/vnni/offline:b8:s128"


def noisy(pairs: int, noise: float, slowdown: float = 0.0, seed: int = 3) -> Pairs:
    rng = np.random.default_rng(seed)
    found = Pairs()
    for _ in range(pairs):
        host = 0.1 * np.exp(rng.normal(0, 0.1))
        a, b = (host * np.exp(rng.normal(0, noise) + rng.normal(0, noise, 6)) * (1 + slow) for slow in (0, slowdown))
        found = found.and_one(a, b)
    return found


@pytest.fixture
def clean(tmp_path: Path) -> Store:
    """A run without a fault, as the self-test measures one."""
    store = Store(tmp_path / "clean")
    found = record()
    sound = dataclasses.replace(found, evidence=Evidence(36, 36, 36, {"qlinear": 36}, "vnni", False, 8, 2))
    with store.create_run(header()) as writer:
        writer.append(sound)
        writer.finish()
    return store


def test_quiet_pairs_alarm_at_most_nominally_and_see_their_margin() -> None:
    found = selftest.compare_series(CELL, noisy(9, 0.005), splits=100)
    assert found.splits == 100
    assert found.false_alarms <= 4 and found.passed
    assert found.floor < found.margin and found.sees_margin
    assert found.smallest_effect is not None and found.smallest_effect <= 0.06


def test_a_noisy_series_says_that_it_cannot_see_its_own_margin() -> None:
    found = selftest.compare_series(CELL, noisy(9, 0.1), splits=100)
    assert not found.sees_margin
    assert found.passed  # noise is no reason to cry wolf
    assert found.smallest_effect is None or found.smallest_effect > 0.08
    report = make_report(series=(found,))
    assert any("cannot see its own margin" in line for line in selftest._notes(selftest.Options.of(True), (found,)))
    assert report.passed


def test_the_gate_between_runs_is_split_too() -> None:
    rng = np.random.default_rng(1)
    quiet = [0.1 * np.exp(rng.normal(0, 0.01)) * np.exp(rng.normal(0, 0.005, 4)) for _ in range(16)]
    found = selftest.gate_series(record(), quiet, splits=100)
    assert (found.name, found.false_alarms) == ("gate", 0)
    assert found.margin == pytest.approx(0.1)
    assert found.smallest_effect in (0.12, 0.15)
    wild = [0.1 * np.exp(rng.normal(0, 0.2)) * np.ones(4) for _ in range(16)]
    assert not selftest.gate_series(record(), wild, splits=100).passed


def test_live_slowdowns_are_judged_by_the_deciding_functions(clean: Store, tmp_path: Path) -> None:
    slowed = {slowdown: noisy(9, 0.005, slowdown) for slowdown in selftest.SLOWDOWNS}
    measured = Measured(noisy(9, 0.005), slowed)
    options = selftest.Options(CELL, "reviews")
    found = list(selftest._slowdown_faults(options, measured, clean, tmp_path))
    assert [(one.by, one.caught) for one in found] == [("compare", True), ("compare", True), ("gate", True)]
    nothing = Measured(measured.plain, {slowdown: noisy(9, 0.005) for slowdown in selftest.SLOWDOWNS})
    missed = list(selftest._slowdown_faults(options, nothing, clean, tmp_path / "other"))
    assert not any(one.caught for one in missed)


def test_recorded_faults_are_caught_by_the_store_and_the_gate(clean: Store, tmp_path: Path) -> None:
    stale, corrupted = selftest._recorded_faults(clean, tmp_path)
    assert stale.caught and "run-before" in stale.detail and "refused" in stale.detail
    assert corrupted.caught and corrupted.detail.startswith("exit 2")


def test_evidence_of_a_broken_mask_is_caught_and_sound_evidence_is_not(clean: Store, tmp_path: Path) -> None:
    found = clean.load().records[0]
    granted = dataclasses.replace(found, evidence=dataclasses.replace(found.evidence, amx_permission=True))
    assert selftest._rewritten("granted", clean, granted, tmp_path / "granted").caught
    assert not selftest._rewritten("sound", clean, found, tmp_path / "sound").caught


def make_report(series: tuple[Series, ...] = (), found: tuple[Fault, ...] = ()) -> Report:
    host_id = fingerprint.comparable_id(fingerprint.collect())
    return Report("CPU", host_id, None, 0.0, 60.0, False, CELL, 18, series, found)


def test_it_passes_only_if_all_is_caught() -> None:
    caught, missed = Fault("a", "live", True, "gate", ""), Fault("b", "live", False, "gate", "")
    assert make_report(found=(caught,)).passed
    assert not make_report(found=(caught, missed)).passed
    assert "not caught: b" in selftest.closing_lines(make_report(found=(caught, missed)))[-1]


def test_it_is_kept_for_the_site_and_as_noise_floor_of_comparisons(tmp_path: Path) -> None:
    assert selftest.stored_floors(tmp_path) == {}
    series = selftest.compare_series(CELL, noisy(9, 0.01), splits=50)
    report = make_report((series,), (Fault("a", "live", True, "gate", "said"),))
    path = selftest.save(report, tmp_path)
    assert path == tmp_path / "analyses" / f"selftest-{report.fingerprint}.json"
    data = json.loads(path.read_text())
    assert data["schema_version"] == 1 and data["passed"] is True
    assert data["series"][0]["sees_margin"] == series.sees_margin
    assert data["faults"] == [{"name": "a", "how": "live", "caught": True, "by": "gate", "detail": "said"}]
    assert selftest.stored_floors(tmp_path) == {CELL: series.floor}
    path.write_text("{}")
    assert selftest.stored_floors(tmp_path) == {}


def test_a_slowdown_lengthens_each_call_by_its_fraction() -> None:
    clock = iter(range(0, 100, 10))
    ticks: list[int] = []

    def fake() -> int:
        ticks.append(next(clock))
        return ticks[-1]

    original = faults.time.perf_counter_ns
    faults.time.perf_counter_ns = fake
    try:
        assert faults.slowed(lambda: "result", 1.0)() == "result"
    finally:
        faults.time.perf_counter_ns = original
    assert ticks == [0, 10, 20]  # it took 10, so it goes on until 20


def test_an_unknown_fault_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, "gremlin")
    with pytest.raises(UsageError, match="scale, unfused, mask"):
        faults.named()
    monkeypatch.setenv(faults.VARIABLE, "")
    assert faults.named() is None
