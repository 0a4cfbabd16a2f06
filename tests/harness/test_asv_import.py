"""asv's result files, written by asv itself, become runs: samples, units, commit and host; twice is once."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
from asv.results import Results

from harness import asv_import, cli, fingerprint, metrics
from harness.errors import AssetError
from harness.records import Store

COMMIT = "0123456789abcdef0123456789abcdef01234567"
STARTED_MS = 1_700_000_000_000
PARAMS = [["'minilm'"], ["'fp32'", "'sq-static'"], ["'vnni'", "'amx'"], ["'offline:b8:s128'"]]
HOST = {"machine": "somewhere", "cpu": "Some Xeon", "num_cpu": "8", "os": "Linux 6.1", "arch": "x86_64", "ram": "1"}
TIME = "cells.Cell.track_seconds_per_sequence"


def write(
    folder: Path,
    seconds: list[list[float] | None],
    machine: dict[str, str] = HOST,
    commit: str = COMMIT,
    started: int = STARTED_MS,
) -> Path:
    """One result file by asv's own writer. ``seconds``: samples of a sequence by parameters; None: n/a."""
    results = Results({**machine, "python": "3.11"}, {}, commit, started - 5000, "3.11", "existing-py", {})
    medians = [None if samples is None else sorted(samples)[len(samples) // 2] for samples in seconds]
    results._results = {TIME: medians, "cells.Cell.track_model_bytes": [100.0] * 4}
    results._samples = {TIME: seconds, "cells.Cell.track_model_bytes": [None] * 4}
    results._benchmark_params = dict.fromkeys(results._results, PARAMS)
    results._started_at = dict.fromkeys(results._results, started)
    results._benchmark_version = dict.fromkeys(results._results, "1")
    results._stats = {name: [None] * 4 for name in results._results}
    results._profiles, results._duration = {}, {}
    results.save(str(folder))
    (folder / machine["machine"] / "machine.json").write_text(json.dumps({**machine, "version": 1}))
    return folder


SAMPLES: list[list[float] | None] = [[0.02, 0.021, 0.019], None, [0.005, 0.006, 0.004], [float("nan")]]


def test_samples_units_commit_and_machine_come_over(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    done = asv_import.import_asv(write(tmp_path / "asv", SAMPLES), store)
    assert (len(done.new), done.known, done.results, done.problems) == (1, 0, 2, ())
    run = store.load(done.new[0])
    assert run.finished and not run.problems
    assert (run.header.commit, run.header.started_at, run.header.profile) == (COMMIT, STARTED_MS / 1000, "asv")
    assert run.header.gated == ()
    assert (run.header.host["cpu_model"], run.header.host["cores_online"]) == ("Some Xeon", 8)
    by_key = {record.cell.key: record for record in run.records}
    assert set(by_key) == {f"minilm/int8/{recipe}/vnni/offline:b8:s128" for recipe in ("fp32", "sq-static")}
    quantized = by_key["minilm/int8/sq-static/vnni/offline:b8:s128"]
    assert quantized.timing.rounds[0].samples_s == pytest.approx((0.04, 0.048, 0.032))  # eight sequences a batch
    assert metrics.get("seconds_per_sequence").extract(quantized) == pytest.approx(0.005)
    assert quantized.speedup is not None and quantized.speedup.value == pytest.approx(4.0)
    assert quantized.memory.model_bytes == 100


def test_importing_again_adds_nothing_and_is_no_failure(tmp_path: Path) -> None:
    store, folder = Store(tmp_path / "store"), write(tmp_path / "asv", SAMPLES)
    asv_import.import_asv(folder, store)
    before = sorted(path.read_bytes() for path in store.root.rglob("*.jsonl"))
    again = asv_import.import_asv(folder, store)
    assert (again.new, again.known) == ((), 1)
    assert sorted(path.read_bytes() for path in store.root.rglob("*.jsonl")) == before
    write(folder, SAMPLES, commit="f" * 40)
    write(folder, SAMPLES, started=STARTED_MS + 1000)  # measured anew
    assert len(asv_import.import_asv(folder, store).new) == 2


@pytest.mark.parametrize("samples", [[None] * 4, [[float("nan")]] * 4])
def test_nothing_imported_is_a_failure(tmp_path: Path, samples: list[list[float] | None]) -> None:
    store = Store(tmp_path / "store")
    with pytest.raises(AssetError, match="make asv"):
        asv_import.import_asv(tmp_path / "nowhere", store)
    with pytest.raises(AssetError, match="no result of asv"):
        asv_import.import_asv(write(tmp_path / "asv", samples), store)
    assert not store.runs()


def test_this_hosts_results_join_its_own_series(tmp_path: Path) -> None:
    own = fingerprint.collect()
    machine = {
        **HOST,
        "machine": platform.node(),
        "cpu": str(own["cpu_model"]),
        "num_cpu": str(own["cores_online"]),
    }
    store = Store(tmp_path / "store")
    (run_id,) = asv_import.import_asv(write(tmp_path / "asv", SAMPLES, machine), store).new
    assert store.load(run_id).header.fingerprint == fingerprint.comparable_id(own)


def test_a_stored_host_of_the_same_cpu_is_the_machine(tmp_path: Path) -> None:
    from samples import record, write_run

    store = Store(tmp_path / "store")
    host = {**fingerprint.collect(), "cpu_model": "Some Xeon", "cores_online": 8, "microcode": "0x7"}
    own = fingerprint.comparable_id(host)
    write_run(store, record(), host=host, fingerprint=own)
    (run_id,) = asv_import.import_asv(write(tmp_path / "asv", SAMPLES), store).new
    assert store.load(run_id).header.fingerprint == own


def test_another_unit_and_a_damaged_file_are_left_out_and_said(tmp_path: Path) -> None:
    folder = write(tmp_path / "asv", SAMPLES)
    (folder / "somewhere" / "deadbeef-existing.json").write_text("{")
    done = asv_import.import_asv(folder, Store(tmp_path / "store"))
    assert done.results == 2
    assert "deadbeef-existing.json is left out" in done.problems[0]
    (folder / "benchmarks.json").write_text(json.dumps({TIME: {"unit": "minutes"}, "version": 2}))
    with pytest.raises(AssetError, match="in minutes, not in seconds"):
        asv_import.import_asv(folder, Store(tmp_path / "other"))


def test_the_verb_says_what_it_did_and_fails_on_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, results = write(tmp_path / "asv", SAMPLES), tmp_path / "store"
    assert cli.main(["import", "asv", str(folder), "--results", str(results)]) == 0
    assert capsys.readouterr().out.startswith("asv-01234567-")
    assert cli.main(["import", "asv", str(folder), "--results", str(results)]) == 0
    assert "1 runs were there already" in capsys.readouterr().err
    assert cli.main(["import", "asv", str(tmp_path / "none"), "--results", str(results)]) == 66
