"""Doctor's checks, on made-up hosts and on this one."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from harness import assets, doctor, fingerprint
from harness.doctor import Check
from harness.errors import ToolchainMissing
from int8 import isa


def one(checks: list[Check], name: str) -> Check:
    (found,) = [check for check in checks if check.name == name]
    return found


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host on which nothing runs and enough memory is free."""
    monkeypatch.setattr(doctor, "SAMPLE_S", 0.01)
    write(tmp_path, "proc/stat", "cpu  0 0 0 0 0 0 0 0 0 0\n")
    write(tmp_path, "proc/meminfo", f"MemAvailable: {16 * 1024**2} kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    return tmp_path


def test_every_check_that_is_not_ok_says_what_to_do(quiet: Path) -> None:
    checks = doctor.examine(quiet / "results", quiet)
    assert {"ISA", "AMX permission", "C++ compiler", "disk", "memory", "other load", "threads"} <= {
        c.name for c in checks
    }
    assert {"governor", "assets", "versions"} <= {check.name for check in checks}
    for check in checks:
        assert check.finding and "\n" not in check.finding
        assert check.state == "ok" or check.advice, check
    assert not (quiet / "results").exists(), "looking must not create anything"


@pytest.mark.parametrize(("states", "code"), [(["ok"], 0), (["ok", "warn"], 0), (["warn", "fail", "ok"], 3), ([], 0)])
def test_only_a_failed_check_fails(states: list[doctor.State], code: int) -> None:
    assert doctor.exit_code([Check("x", state, "y") for state in states]) == code


@pytest.mark.parametrize(("kib", "state"), [(16 * 1024**2, "ok"), (3 * 1024**2, "warn"), (1024**2, "fail")])
def test_memory(quiet: Path, kib: int, state: str) -> None:
    write(quiet, "proc/meminfo", f"MemAvailable: {kib} kB\n")
    assert one(list(doctor._memory(quiet, quiet)), "memory").state == state


def test_memory_within_the_cgroup(quiet: Path) -> None:
    write(quiet, "sys/fs/cgroup/memory.max", str(1024**3))
    assert one(list(doctor._memory(quiet, quiet)), "memory").state == "fail"


@pytest.mark.parametrize(
    ("busy", "stolen", "state"), [(0, 0, "ok"), (0.3, 0, "warn"), (0.9, 0, "fail"), (0, 0.5, "ok")]
)
def test_other_load(quiet: Path, monkeypatch: pytest.MonkeyPatch, busy: float, stolen: float, state: str) -> None:
    cpus = fingerprint.usable_threads(quiet)
    readings = iter([(10.0, 5.0), (10.0 + busy * cpus * 0.01, 5.0 + stolen * cpus * 0.01)])
    monkeypatch.setattr(doctor, "_cpu_seconds", lambda root: next(readings))
    checks = list(doctor._load(quiet, quiet))
    assert one(checks, "other load").state == state
    assert [check.name for check in checks if check.name == "steal"] == (["steal"] if stolen else [])


def test_the_governor(quiet: Path) -> None:
    name = "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
    assert one(list(doctor._frequency(quiet, quiet)), "governor").state == "ok"
    write(quiet, name, "powersave\n")
    assert one(list(doctor._frequency(quiet, quiet)), "governor").state == "warn"
    write(quiet, name, "performance\n")
    assert one(list(doctor._frequency(quiet, quiet)), "governor").state == "ok"


@pytest.mark.parametrize(
    ("quota", "state"),
    [("max 100000", "ok"), ("200000 100000", "ok"), ("250000 100000", "warn"), ("50000 100000", "warn")],
)
def test_a_quota_of_a_part_of_a_cpu(quiet: Path, monkeypatch: pytest.MonkeyPatch, quota: str, state: str) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    write(quiet, "sys/fs/cgroup/cpu.max", quota)
    assert one(list(doctor._threads(quiet, quiet)), "threads").state == state


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolchainMissing, match=r"no-such-compiler is not on the PATH.*apt install g\+\+") as caught:
        doctor.require_toolchain()
    assert caught.value.exit_code == 69


@pytest.mark.parametrize(
    ("says", "name", "words"),
    [
        ("probe.cpp:2:10: fatal error: Python.h: No such file", "Python headers", "-dev"),
        ("probe.cpp:1:10: fatal error: 'omp.h' file not found", "C++ compiler", "OpenMP"),
        ("error: bad value (sapphirerapids) for -march=", "C++ compiler", "g++ 12"),
    ],
)
def test_a_compiler_that_refuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str, name: str, words: str
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{says}\nEND\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    check = one(list(doctor._toolchain(tmp_path, tmp_path)), name)
    assert check.state == "fail" and words in f"{check.finding} {check.advice}"
    with pytest.raises(ToolchainMissing):
        doctor.require_toolchain()


def test_the_compiler_is_asked_for_each_isa(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(command: str, *flags: str) -> str | None:
        asked.extend(flags)
        return None

    monkeypatch.setattr(doctor, "compile_problem", answer)
    doctor.require_toolchain()
    assert asked == [doctor.march(name) for name in isa.supported()]
    assert all(re.fullmatch(r"-march=[a-z0-9-]+", flag) for flag in asked)


def test_this_hosts_compiler_compiles_what_inductor_needs() -> None:
    if subprocess.run(["g++", "--version"], capture_output=True, check=False).returncode:
        pytest.skip("no g++ here")
    assert doctor.compile_problem("g++", "-march=haswell") is None
    assert "march" in (doctor.compile_problem("g++", "-march=nonsense") or "")


def test_assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INT8_ASSETS", str(tmp_path))
    check = one(list(doctor._assets(tmp_path, tmp_path)), "assets")
    assert check.state == "warn" and check.advice == "harness fetch"
    assert all(name in check.finding for name in assets.known())
    (tmp_path / next(iter(assets.known().values())).folder).mkdir()
    found = list(doctor._assets(tmp_path, tmp_path))
    assert [check.state for check in found] == ["fail", "warn"], "an empty folder is a damaged asset"


def test_versions_against_a_lock_file() -> None:
    torch = fingerprint.installed("torch")
    numpy = fingerprint.installed("numpy")
    assert torch is not None and numpy is not None
    lock = f"# a remark ==\n\nnumpy=={numpy}\ntorch=={torch.partition('+')[0]}\n"
    assert list(doctor.version_differences(lock)) == []
    assert list(doctor.version_differences(lock + "numpy==0.1\nno-such-thing==1\n")) == [
        f"numpy {numpy} (locked: 0.1)",
        "no-such-thing missing",
    ]
