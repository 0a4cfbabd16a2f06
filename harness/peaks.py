"""Measures this host's roofs: operations a second by instruction set, bytes a second by level of the memory hierarchy.

By a small program of our own (``peaks.cpp``), compiled at first use and kept by the hash of its source, the compiler
and its flags. It runs as a process of its own, one thread on each of the CPUs that a worker would get, so AMX
permission never reaches this process. A host's peaks are measured once and kept under its fingerprint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.resources
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import fingerprint
from harness.errors import HarnessError, ToolchainMissing
from harness.processes import worker_cpus
from int8 import isa as isas

#: Target attributes in the source choose instructions, function by function, so that one binary serves every ISA.
FLAGS = ("-O2", "-std=c++17", "-pthread")
#: Milliseconds of one window. Fifteen windows of some thirteen loops are six seconds; touching memory adds one or two.
WINDOW_MS = 30
_COMPILE_TIMEOUT_S, _RUN_TIMEOUT_S = 120, 120

#: Arrays for memory bandwidth: at least so many times the last-level cache, within the bounds below.
_BEYOND_L3 = 4
_MEMORY_MIN_BYTES, _MEMORY_MAX_BYTES = 256 << 20, 2 << 30
_MEMORY_SHARE = 4  # of what is available, one part in so many

#: The loops that are an ISA's roof, by dtype; the best of several counts. BF16 is native on AMX alone.
_LOOPS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "amx": {"int8": ("int8_amx",), "bf16": ("bf16_amx",), "fp32": ("fp32_avx512", "fp32_avx2")},
    "vnni": {"int8": ("int8_vnni",), "fp32": ("fp32_avx512", "fp32_avx2")},
    "avx512": {"int8": ("int8_maddubs_avx512", "int8_maddwd_avx512"), "fp32": ("fp32_avx512", "fp32_avx2")},
    "avx2": {"int8": ("int8_maddubs_avx2", "int8_maddwd_avx2"), "fp32": ("fp32_avx2",)},
}

#: What a rate is called for people, in the order of tables.
TITLES: Mapping[str, str] = {
    "int8_amx": "INT8, AMX (tdpbssd)",
    "int8_vnni": "INT8, AVX512-VNNI (vpdpbusd)",
    "int8_maddubs_avx512": "INT8, AVX512 (vpmaddubsw, 7-bit weights)",
    "int8_maddwd_avx512": "INT8 as pairs of 16 bit, AVX512 (vpmaddwd)",
    "int8_maddubs_avx2": "INT8, AVX2 (vpmaddubsw, 7-bit weights)",
    "int8_maddwd_avx2": "INT8 as pairs of 16 bit, AVX2 (vpmaddwd)",
    "bf16_amx": "BF16, AMX (tdpbf16ps)",
    "fp32_avx512": "FP32, AVX512 (FMA)",
    "fp32_avx2": "FP32, AVX2 (FMA)",
    "l2_read": "L2, read",
    "l3_read": "last-level cache, read",
    "memory_read": "memory, read",
    "memory_triad": "memory, triad",
}


class PeaksError(HarnessError):
    """The measuring program failed."""

    exit_code = 2


@dataclass(frozen=True)
class Rate:
    """Operations or bytes a second: the best window. ``spread``: how far the median one stays below it, 0 to 1."""

    rate: float
    spread: float


@dataclass(frozen=True)
class WorkingSets:
    """Bytes that all threads together pass over for each level; 0 where the level's size is unknown or too small."""

    memory: int
    l3: int
    l2: int


@dataclass(frozen=True)
class Peaks:
    """What one host gives at best under one ISA.

    Attributes:
        host: the fingerprint's id.
        isa, threads: under which it was measured, one thread a core.
        measured_at: Unix time in seconds.
        rates: by loop: those of arithmetic in operations a second (a multiply-add is two), the others in bytes.
        sets: working sets of the bandwidths.
        l2_bytes: of all cores in use together; None where unknown.
        l3_bytes: of the whole cache, which others may share; None where unknown.
    """

    host: str
    isa: str
    threads: int
    measured_at: float
    rates: Mapping[str, Rate]
    sets: WorkingSets
    l2_bytes: int | None
    l3_bytes: int | None

    def operations(self, dtype: str) -> float | None:
        """Peak operations a second in ``dtype`` (int8, bf16, fp32); None where the ISA has no native instruction."""
        loops = _LOOPS[self.isa].get(dtype, ())
        return max((self.rates[loop].rate for loop in loops if loop in self.rates), default=None)

    def bandwidth(self, level: str) -> float | None:
        """Bytes a second read from ``level`` (l2, l3, memory); None where it was not measured."""
        found = self.rates.get(f"{level}_read")
        return None if found is None else found.rate

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Peaks:
        """The peaks in ``data``, made by dataclasses.asdict and kept as JSON."""
        rates = {name: Rate(**rate) for name, rate in data["rates"].items()}
        return cls(**{**data, "rates": rates, "sets": WorkingSets(**data["sets"])})


def measure(isa: str, *, fresh: bool = False, cache: Path | None = None) -> Peaks:
    """This host's peaks under ``isa``: as kept, or measured now (some ten seconds) and kept.

    Args:
        isa: amx, vnni, avx512, avx2, or native.
        fresh: measure again, whatever is kept.
        cache: where program and results are kept; by default a folder of the project's cache.

    Raises:
        IsaError: the host lacks the ISA.
        ToolchainMissing: no C++ compiler, or it cannot compile the program.
        PeaksError: the program failed.
    """
    isa, folder, cpus = isas.resolve(isa), cache or default_cache(), worker_cpus()
    host = fingerprint.collect()
    kept = folder / f"{fingerprint.comparable_id(host)}-{isa}-{len(cpus)}-{_hash(_source())}.json"
    known = None if fresh else _read(kept)
    if known is not None:
        return known
    sets = working_sets(host["l2_bytes"], host["l3_bytes"], len(cpus), host["memory_available_bytes"])
    rates = run(program(folder), cpus, isa, sets)
    l2 = host["l2_bytes"]
    found = Peaks(
        host=fingerprint.comparable_id(host),
        isa=isa,
        threads=len(cpus),
        measured_at=time.time(),
        rates=rates,
        sets=sets,
        l2_bytes=None if l2 is None else l2 * len(cpus),
        l3_bytes=host["l3_bytes"],
    )
    _write(kept, json.dumps(dataclasses.asdict(found), indent=1).encode())
    return found


def default_cache() -> Path:
    """Where the program and the results are kept."""
    return fingerprint.project_root() / ".cache" / "peaks"


def working_sets(l2_bytes: int | None, l3_bytes: int | None, threads: int, available: int | None) -> WorkingSets:
    """Working sets that lie well inside a level and well outside the one below.

    Args:
        l2_bytes: of one core.
        l3_bytes: of the whole cache.
        threads: one a core.
        available: free bytes of memory.
    """
    l2_all = (l2_bytes or 0) * threads
    l3 = min((l3_bytes or 0) // 2, 4 * l2_all)
    wanted = min(max(_BEYOND_L3 * (l3_bytes or 0), _MEMORY_MIN_BYTES), _MEMORY_MAX_BYTES)
    memory = wanted if available is None else min(wanted, available // _MEMORY_SHARE)
    return WorkingSets(memory, l3 if l3 >= 2 * l2_all else 0, l2_all // 2)


def program(folder: Path) -> Path:
    """The compiled program in ``folder``, compiled now unless it is there.

    Raises:
        ToolchainMissing: no C++ compiler, or it cannot compile the program.
    """
    command = fingerprint.compiler()
    if shutil.which(command) is None:
        raise ToolchainMissing(
            f"no C++ compiler: {command} is not on the PATH; install it (apt install g++), or name one in CXX"
        )
    version = str(fingerprint.collect_field("compiler"))
    target = folder / f"peaks-{_hash('|'.join((_source(), command, version, *FLAGS)))}"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source, built = Path(scratch) / "peaks.cpp", Path(scratch) / "peaks"
        source.write_text(_source(), encoding="utf-8")
        _compile([command, *FLAGS, str(source), "-o", str(built)])
        built.replace(target)
    return target


def _compile(line: list[str]) -> None:
    try:
        answer = subprocess.run(line, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainMissing(f"{line[0]} cannot compile peaks.cpp: {error}; install g++ 12 or newer") from error
    if answer.returncode != 0:
        said = next((text for text in answer.stderr.splitlines() if "error" in text), "it failed and said nothing")
        raise ToolchainMissing(f"{line[0]} cannot compile peaks.cpp: {said.strip()}; install g++ 12 or newer")


def run(
    binary: Path, cpus: tuple[int, ...], isa: str, sets: WorkingSets, window_ms: int = WINDOW_MS
) -> dict[str, Rate]:
    """What the program measures on ``cpus`` under ``isa``, by loop.

    Raises:
        PeaksError: it refused, failed, or did not end in time.
    """
    numbers = (sets.memory, sets.l3, sets.l2, window_ms)
    line = [str(binary), ",".join(map(str, cpus)), isa, *map(str, numbers)]
    try:
        answer = subprocess.run(line, capture_output=True, text=True, timeout=_RUN_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise PeaksError(f"peaks could not be measured: {error}; free the host and try again") from error
    if answer.returncode != 0:
        said = answer.stderr.strip() or f"it ended with code {answer.returncode} and said nothing"
        raise PeaksError(f"peaks could not be measured under {isa}: {said}")
    return {name: Rate(**rate) for name, rate in json.loads(answer.stdout).items()}


def _source() -> str:
    return importlib.resources.files("harness").joinpath("peaks.cpp").read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _read(path: Path) -> Peaks | None:
    """Peaks as kept; None where there are none, or a file that cannot be read as such."""
    try:
        return Peaks.from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write(path: Path, data: bytes) -> None:
    """Write a file whole: another process may read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    Path(name).replace(path)
