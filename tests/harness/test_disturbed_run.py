"""A run on a host that is said to be busy: invalid, not failed, with the evidence; refused while another measures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness import disturbance, gating, host_lock, runner
from harness.errors import StoreError
from harness.matrix import Budget, Profile, Scenario
from harness.records import Disturbance, Store
from harness.runner import RunOptions

PROFILE = Profile(
    name="tiny",
    about="a test's",
    models=("tiny-bert",),
    recipes={"int8": ("fp32",)},
    isas=("native",),
    scenarios=(Scenario.parse("offline:b2:s16"),),
    gated=("fp32",),
    budget=Budget(rounds=2, slice_s=0.02, min_iterations=3, max_iterations=20, warmup_s=0.5),
)


def test_a_run_on_a_busy_host_is_invalid_with_the_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(disturbance.VARIABLE, raising=False)
    real = disturbance.between

    def busy(before: disturbance.Reading, after: disturbance.Reading, cpus: int) -> Disturbance:
        found = real(before, after, cpus)
        assert found.others is not None, "this host shows its counters"
        return Disturbance(1.0, 0.6, found.steal)

    monkeypatch.setattr(disturbance, "between", busy)
    store = Store(tmp_path)
    summary = runner.run(RunOptions(PROFILE), store)
    assert summary.counts["invalid"] == 1 and summary.exit_code == 3
    run = store.load(summary.run_id)
    (record,) = run.records
    assert record.status == "invalid"
    assert "other processes took 60%" in (record.reason or "")
    assert record.timing.rounds, "what was measured is kept"
    assert record.disturbance is not None
    assert (record.disturbance.seconds, record.disturbance.others) == (2.0, pytest.approx(0.6))
    assert "other processes took 60%" in (run.header.invalid_reason or "")
    assert gating.gate(store).exit_code == 3


def test_another_measurement_on_the_host_is_refused_whatever_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(host_lock.VARIABLE, str(tmp_path / "lock"))
    hold = (
        "from harness import host_lock; import sys\n"
        "with host_lock.exclusive(): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(StoreError, match=rf"pid {holder.pid}.*on this host"):
            runner.run(RunOptions(PROFILE), Store(tmp_path / "store"))
    finally:
        holder.kill()
        holder.wait()
    assert not Store(tmp_path / "store").runs()
