"""Preloaded libraries: found or an error, and really mapped by the processes that were to have them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import fingerprint, preload, processes
from harness.errors import ToolchainMissing
from harness.processes import WorkerError, WorkerHandle
from harness.worker import WorkerSpec
from int8 import isa


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that does nothing, called like an allocator."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "nothing.c").write_text("int nothing_at_all(void) { return 0; }\n")
    path = folder / "libtcmalloc_test.so.4"
    command = [fingerprint.compiler(), "-x", "c", "-shared", "-fPIC", "-o", str(path), str(folder / "nothing.c")]
    subprocess.run(command, check=True)
    return path


def test_a_missing_library_is_an_error_that_says_what_to_install() -> None:
    with pytest.raises(ToolchainMissing, match=r"libtcmaloc .* not installed; install it"):
        preload.find("libtcmaloc")
    with pytest.raises(ToolchainMissing, match="does not exist"):
        preload.find("/no/such/libtcmalloc.so")


def test_libraries_are_found_by_name() -> None:
    assert preload.find("libstdc++").name.startswith("libstdc++.so")


def test_inside_the_block_the_fingerprint_and_new_processes_have_it(library: Path) -> None:
    before = os.environ.get(preload.VARIABLE)
    with preload.preloaded([str(library)]):
        assert fingerprint.collect_field("allocator") == "tcmalloc"
        assert fingerprint.collect_field("preload") == [library.name]
        command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert child.stdout is not None and child.stdout.readline()
            assert preload.missing_from(child.pid) == []
            assert preload.missing_from(os.getpid()) == [str(library)]
        finally:
            child.kill()
            child.wait()
    assert os.environ.get(preload.VARIABLE) == before


def test_one_that_the_user_named_himself_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(preload.VARIABLE, "/no/such/libjemalloc.so.2")
    with pytest.raises(ToolchainMissing, match="libjemalloc"), preload.preloaded([]):
        pass


def test_a_worker_that_did_not_load_it_fails(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = "offline:b2:s16"
    spec = WorkerSpec("tiny-bert", "int8", "fp32", isa.best(), "jit", None, (scenario,), processes.worker_cpus())
    handle = WorkerHandle(spec, tmp_path / "log")
    try:
        time.sleep(0.2)
        monkeypatch.setenv(preload.VARIABLE, str(library))  # asked for after it started, so it cannot have it
        with pytest.raises(WorkerError, match=r"did not load .*libtcmalloc_test"):
            handle.prepare()
    finally:
        handle.kill()
