"""Was the host disturbed: counters of made-up hosts, the limits, and a real neighbour that is seen."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import disturbance
from harness.disturbance import Limits, Reading
from harness.records import Disturbance

TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about the check that the others leave out."""
    monkeypatch.delenv(disturbance.VARIABLE, raising=False)


def host(root: Path, busy: int = 0, steal: int = 0, throttled: int | None = None, khz: int | None = None) -> Path:
    """A host with four CPUs; ``busy`` and ``steal`` are ticks of each of the first two."""
    (root / "proc" / str(os.getpid())).mkdir(parents=True, exist_ok=True)
    own = "1 (py thon) S " + " ".join(["0"] * 10) + " 0 0 0 0 0"
    (root / "proc" / str(os.getpid()) / "stat").write_text(own)
    rows = [f"cpu{n} {busy if n < 2 else 99999} 0 0 0 0 0 0 {steal if n < 2 else 99999} 0 0" for n in range(4)]
    (root / "proc" / "stat").write_text("\n".join(["cpu  0 0 0 0", *rows]) + "\n")
    for cpu in range(2):
        for name, value in (("thermal_throttle/core_throttle_count", throttled), ("cpufreq/scaling_cur_freq", khz)):
            path = root / f"sys/devices/system/cpu/cpu{cpu}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if value is not None:
                path.write_text(f"{value}\n")
    return root


def test_counters_are_read_of_the_measured_cpus_alone(tmp_path: Path) -> None:
    found = disturbance.read((0, 1), (), host(tmp_path, busy=3 * TICKS, steal=TICKS, throttled=4, khz=2_500_000))
    assert (found.busy_s, found.steal_s, found.own_s) == (6.0, 2.0, 0.0)
    assert (found.throttled, found.frequency_mhz) == (8, 2500.0)


def test_what_a_host_does_not_show_is_none_and_disturbs_nobody(tmp_path: Path) -> None:
    found = disturbance.read((0, 1), (12345678,), tmp_path)
    assert (found.busy_s, found.steal_s, found.throttled, found.frequency_mhz) == (None, None, None, None)
    later = Reading(found.at_s + 10, None, None, 0.0, None, None)
    assert disturbance.reason(disturbance.between(found, later, 2)) is None


def test_shares_are_of_all_measured_cpus_and_without_ourselves() -> None:
    before = Reading(0.0, 100.0, 10.0, 50.0, 3, 2000.0)
    after = Reading(10.0, 116.0, 11.0, 60.0, 5, 1000.0)
    assert disturbance.between(before, after, 2) == Disturbance(10.0, 0.3, 0.05, 2, 1000.0, 2000.0)


def test_windows_add_up_by_their_length() -> None:
    found = disturbance.total([Disturbance(1.0, 0.5, 0.0, 1, 900.0, 1000.0), Disturbance(3.0, 0.1, None)])
    assert found is not None
    assert (found.seconds, found.others, found.steal, found.throttled) == (4.0, pytest.approx(0.2), 0.0, 1)
    assert (found.lowest_mhz, found.highest_mhz) == (900.0, 1000.0)
    assert disturbance.total([]) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Disturbance(5.0, 0.21, 0.0), "other processes took 21%"),
        (Disturbance(5.0, 0.0, 0.11), "other guests of the machine took 11%"),
        (Disturbance(5.0, 0.0, 0.0, throttled=2), "throttled for heat 2 times"),
        (Disturbance(5.0, 0.0, 0.0, 0, 1000.0, 2000.0), "1000 to 2000 MHz"),
    ],
)
def test_beyond_each_limit_it_is_invalid_with_the_evidence(found: Disturbance, words: str) -> None:
    assert words in (disturbance.reason(found) or "")


def test_within_the_limits_or_seen_too_briefly_it_is_not() -> None:
    assert disturbance.reason(Disturbance(5.0, 0.2, 0.1, 0, 1600.0, 2000.0)) is None
    assert disturbance.reason(Disturbance(Limits().seconds / 2, 1.0, 1.0)) is None
    assert disturbance.reason(None) is None


def test_shared_machines_can_ask_for_evidence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(disturbance.VARIABLE, "record")
    assert disturbance.reason(Disturbance(5.0, 0.9, 0.9)) is None


def test_a_whole_run_may_differ_in_frequency() -> None:
    found = disturbance.without_frequency(Disturbance(5.0, 0.0, 0.0, 0, 1000.0, 3000.0))
    assert disturbance.reason(found) is None


def test_a_real_neighbour_is_seen_and_our_own_work_is_not() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    spin = "import time; end = time.monotonic() + 1.0\nwhile time.monotonic() < end: pass"
    before = disturbance.read(cpus, ())
    neighbour = subprocess.Popen([sys.executable, "-c", spin])
    time.sleep(0.8)
    after = disturbance.read(cpus, ())
    with_it = disturbance.between(before, after, len(cpus))
    own = disturbance.between(before, disturbance.read(cpus, (neighbour.pid,)), len(cpus))
    neighbour.wait()
    assert with_it.others is not None and own.others is not None
    assert 0.0 <= own.others < with_it.others <= 1.0
