"""The measuring program: it compiles, refuses what the CPU lacks, reports every loop, and is measured once a host."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness import peaks
from harness.errors import ToolchainMissing
from harness.peaks import Peaks, Rate, WorkingSets
from harness.processes import worker_cpus
from int8 import isa
from int8.errors import IsaError

MIB = 1 << 20
SMALL = WorkingSets(memory=8 * MIB, l3=2 * MIB, l2=MIB // 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("peaks")


@pytest.fixture(scope="module")
def binary(folder: Path) -> Path:
    return peaks.program(folder)


def test_it_is_compiled_once(binary: Path, folder: Path) -> None:
    before = binary.stat()
    assert peaks.program(folder) == binary
    assert binary.stat().st_mtime_ns == before.st_mtime_ns
    assert [path.name for path in folder.iterdir() if path.is_dir()] == []  # no scratch is left


@pytest.mark.parametrize("name", isa.supported())
def test_every_loop_of_an_isa_gives_a_rate(binary: Path, name: str) -> None:
    rates = peaks.run(binary, worker_cpus(), name, SMALL, window_ms=1)
    arithmetic = {loop for loops in peaks._LOOPS[name].values() for loop in loops}
    assert set(rates) >= arithmetic | {"l2_read", "l3_read", "memory_read", "memory_triad"}
    assert set(rates) <= set(peaks.TITLES)
    for rate in rates.values():
        assert rate.rate > 0
        assert 0 <= rate.spread < 1


def test_a_level_without_a_working_set_is_left_out(binary: Path) -> None:
    rates = peaks.run(binary, worker_cpus()[:1], "avx2", WorkingSets(8 * MIB, 0, 0), window_ms=1)
    assert not {"l2_read", "l3_read"} & set(rates)


@pytest.mark.parametrize("name", [name for name in isa.NAMES if isa.why_unsupported(name) is not None])
def test_what_the_cpu_lacks_is_refused(binary: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(peaks.PeaksError, match=r"lacks|denies"):
        peaks.run(binary, (0,), name, SMALL, window_ms=1)
    with pytest.raises(IsaError):
        peaks.measure(name, cache=tmp_path)


@pytest.mark.parametrize("line", [[], ["0", "sse", "1", "1", "1", "1"], ["x", "avx2", "1", "1", "1", "1"]])
def test_wrong_use_is_said(binary: Path, line: list[str]) -> None:
    answer = subprocess.run([str(binary), *line], capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert answer.stderr.startswith("peaks: ")
    assert answer.stdout == ""


def test_no_compiler_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolchainMissing, match=r"no-such-compiler is not on the PATH; install"):
        peaks.program(tmp_path)
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ToolchainMissing, match=r"false cannot compile peaks\.cpp"):
        peaks.program(tmp_path)


def test_a_host_is_measured_once_and_again_when_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []

    def run(binary: Path, cpus: tuple[int, ...], name: str, sets: WorkingSets) -> dict[str, Rate]:
        calls.append(name)
        return {"fp32_avx2": Rate(1e11, 0.01), "memory_read": Rate(1e10, 0.02)}

    monkeypatch.setattr(peaks, "run", run)
    first = peaks.measure("avx2", cache=tmp_path)
    assert peaks.measure("avx2", cache=tmp_path) == first  # and the file gave back all of it
    assert len(calls) == 1
    again = peaks.measure("avx2", cache=tmp_path, fresh=True)
    assert len(calls) == 2
    assert again.measured_at > first.measured_at
    for path in tmp_path.glob("*.json"):
        path.write_text("{torn")
    peaks.measure("avx2", cache=tmp_path)
    assert len(calls) == 3


def test_the_roof_of_an_isa_is_that_of_its_own_instructions() -> None:
    rates = {
        "int8_amx": Rate(11.8e12, 0.0),
        "bf16_amx": Rate(5.8e12, 0.0),
        "int8_vnni": Rate(1.5e12, 0.0),
        "fp32_avx512": Rate(0.39e12, 0.0),
        "fp32_avx2": Rate(0.2e12, 0.0),
        "int8_maddubs_avx2": Rate(0.3e12, 0.0),
        "int8_maddwd_avx2": Rate(0.25e12, 0.0),
        "l3_read": Rate(5e10, 0.0),
    }

    def under(name: str) -> Peaks:
        return Peaks("host", name, 2, 0.0, rates, SMALL, MIB, 32 * MIB)

    assert under("amx").operations("int8") == 11.8e12
    assert under("amx").operations("bf16") == 5.8e12
    assert under("vnni").operations("int8") == 1.5e12
    assert under("vnni").operations("bf16") is None
    assert under("vnni").operations("fp32") == 0.39e12
    assert under("avx2").operations("int8") == 0.3e12
    assert under("avx2").operations("fp32") == 0.2e12
    assert under("avx2").bandwidth("l3") == 5e10
    assert under("avx2").bandwidth("memory") is None


def test_working_sets_lie_inside_their_level_and_outside_the_one_below() -> None:
    sets = peaks.working_sets(2 * MIB, 480 * MIB, 2, 64 << 30)
    assert sets == WorkingSets(memory=4 * 480 * MIB, l3=16 * MIB, l2=2 * MIB)
    assert peaks.working_sets(MIB // 2, 32 * MIB, 2, 64 << 30) == WorkingSets(256 * MIB, 4 * MIB, MIB // 2)
    assert peaks.working_sets(2 * MIB, 480 * MIB, 2, 1 << 30).memory == 256 * MIB  # a quarter of what is free
    assert peaks.working_sets(2 * MIB, 4 * MIB, 2, None).l3 == 0  # no larger than the L2 caches together
    assert peaks.working_sets(None, None, 2, None) == WorkingSets(256 * MIB, 0, 0)
