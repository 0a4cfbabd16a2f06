"""Workers as processes: their environment, their protocol, and how they end. Nothing here compiles a model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import processes
from harness.processes import Timeouts, WorkerDeathError, WorkerError, WorkerHandle
from harness.worker import WorkerSpec
from int8 import isa


def spec(model: str = "tiny-bert", recipe: str = "fp32", seq: int = 16) -> WorkerSpec:
    scenarios = (f"offline:b2:s{seq}",)
    return WorkerSpec(model, "int8", recipe, isa.best(), "jit", None, scenarios, processes.worker_cpus())


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[WorkerHandle]:
    worker = WorkerHandle(spec(), tmp_path / "log")
    yield worker
    worker.kill()


def gone(pid: int) -> bool:
    """True once no process has this id (or only its zombie)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(pid: int) -> bool:
    for _ in range(200):
        if gone(pid):
            return True
        time.sleep(0.05)
    return False


def test_the_environment_holds_mask_threads_pinning_and_a_cache_of_its_own() -> None:
    wanted = spec()
    base = {"PATH": "/bin", "OMP_NUM_THREADS": "64", "OMP_WAIT_POLICY": "active", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    found = processes.worker_environment(wanted, base)
    assert found["PATH"] == "/bin"
    assert found["INT8_ISA"] == wanted.isa
    assert found["ONEDNN_MAX_CPU_ISA"] == isa.environment(wanted.isa)["ONEDNN_MAX_CPU_ISA"]
    assert found["OMP_NUM_THREADS"] == str(len(wanted.cpus))
    assert found["GOMP_CPU_AFFINITY"].split() == [str(cpu) for cpu in wanted.cpus]
    assert "OMP_WAIT_POLICY" not in found  # threads of a waiting worker must not spin for ever
    assert found["TORCHINDUCTOR_CACHE_DIR"].endswith(wanted.isa)
    assert processes.compile_cache("amx") != processes.compile_cache("vnni")
    assert found["TOKENIZERS_PARALLELISM"] == "false"


def test_one_cpu_a_core_within_the_affinity(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    for cpu in mine:  # all of them hardware threads of one core
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(",".join(map(str, mine)) + "\n")
    assert processes.worker_cpus(tmp_path) == (mine[0],)
    assert set(processes.worker_cpus()) <= set(mine)


def test_a_quota_bounds_the_threads(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cgroup.controllers").write_text("cpu memory\n")
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("100000 100000\n")
    assert processes.worker_cpus(tmp_path) == (mine[0],)


def test_a_worker_runs_on_its_cpus_in_a_session_of_its_own(handle: WorkerHandle) -> None:
    assert os.sched_getaffinity(handle.pid) == set(handle.spec.cpus)
    assert os.getsid(handle.pid) == handle.pid


def test_a_refused_request_is_answered_and_the_worker_lives_on(handle: WorkerHandle) -> None:
    with pytest.raises(WorkerError, match="unknown request 'sing'"):
        handle.request("sing")
    with pytest.raises(WorkerError, match="unknown request '_ready'"):
        handle.request("_ready")
    with pytest.raises(WorkerError, match="nothing is prepared"):
        handle.request("time", scenario="offline:b2:s16", seconds=1, min_iterations=1, max_iterations=1)
    assert handle.alive


def test_end_ends_it_and_may_be_repeated(handle: WorkerHandle) -> None:
    with pytest.raises(WorkerError):
        handle.request("sing")  # it has started
    handle.end()
    handle.end()
    handle.kill()
    assert not handle.alive
    with pytest.raises(WorkerDeathError):
        handle.request("sing")


def test_prepare_answers_clocks_and_memory_and_prints_cannot_corrupt_it(handle: WorkerHandle) -> None:
    phases: list[str] = []
    ready = handle.prepare(phases.append)
    assert phases[0] == "load"
    assert ready["seconds"]["load"] > 0
    assert (ready["family"], ready["weights"]) == ("bert", "synthetic")
    assert ready["memory"]["linear_weight_bytes"] == 2 * (4 * 64 * 64 + 2 * 64 * 128) * 4
    assert ready["memory"]["peak_rss_bytes"] > ready["memory"]["model_bytes"]


def test_a_model_that_does_not_exist_fails_in_one_line_and_is_logged(tmp_path: Path) -> None:
    worker = WorkerHandle(spec("./no-such-folder/model"), tmp_path / "log")
    try:
        with pytest.raises(WorkerError) as error:
            worker.prepare()
        assert "no-such-folder" in str(error.value)
        assert "\n" not in str(error.value)
        assert "Traceback" in worker.log_text()
    finally:
        worker.kill()


def test_a_scenario_longer_than_the_model_takes_is_refused_before_anything_runs(tmp_path: Path) -> None:
    worker = WorkerHandle(spec(seq=4096), tmp_path / "log")
    try:
        with pytest.raises(WorkerError, match="longer than the"):
            worker.prepare()
    finally:
        worker.kill()


def test_a_killed_worker_is_reported_with_its_signal_and_last_words(handle: WorkerHandle, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("first\n\nlast words here\n")
    os.kill(handle.pid, signal.SIGKILL)
    with pytest.raises(WorkerDeathError, match=r"SIGKILL.*in phase load.*last words here"):
        handle.prepare()
    assert not handle.alive


def test_a_worker_that_does_not_answer_in_time_is_ended(tmp_path: Path) -> None:
    worker = WorkerHandle(spec(), tmp_path / "log", Timeouts(load=0.01))
    with pytest.raises(WorkerDeathError, match="no answer in phase load"):
        worker.prepare()
    assert wait_until_gone(worker.pid)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (1, "exited with code 1"),
        (-signal.SIGILL, "SIGILL (an instruction"),
        (-signal.SIGKILL, "SIGKILL (out of memory"),
        (-signal.SIGSEGV, "SIGSEGV"),
        (-99, "signal 99"),
    ],
)
def test_how_a_process_ended_in_words(code: int, says: str) -> None:
    assert says in processes._how_it_ended(code)


ORPHAN = """
import os, sys, time
from pathlib import Path
from harness import processes
from harness.errors import HarnessError
from harness.worker import WorkerSpec
from int8 import isa
spec = WorkerSpec("tiny-bert", "int8", "fp32", isa.best(), "jit", None, ("single:s8",), processes.worker_cpus())
worker = processes.WorkerHandle(spec, Path(sys.argv[1]))
try:
    worker.request("sing")
except HarnessError:
    print(worker.pid, flush=True)
time.sleep(600)
"""


def test_a_worker_does_not_outlive_its_runner(tmp_path: Path) -> None:
    runner = subprocess.Popen([sys.executable, "-c", ORPHAN, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True)
    assert runner.stdout is not None
    pid = int(runner.stdout.readline())
    assert not gone(pid)
    runner.kill()
    runner.wait()
    runner.stdout.close()
    assert wait_until_gone(pid)
