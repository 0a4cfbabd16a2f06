"""Checks of the host: can it measure at all, and what would disturb a measurement. Imports no torch.

Each check says what was found and, unless all is well, what to do. ``fail`` is kept for what makes a run impossible or
its numbers meaningless; everything that merely makes them worse is ``warn``.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from rich.table import Table
from rich.text import Text

from harness import assets, fingerprint
from harness.errors import AssetError, ToolchainMissing
from int8 import isa

State = Literal["ok", "warn", "fail"]

GIB = 1024**3
#: A cell's worker holds a model in FP32 and INT8, the compiler and its output.
MEMORY_WARN_BYTES, MEMORY_FAIL_BYTES = 4 * GIB, 3 * GIB // 2
#: Compile caches of a run take some hundred MiB an ISA; without any room nothing can be compiled or stored.
DISK_WARN_BYTES, DISK_FAIL_BYTES = 5 * GIB, GIB // 2
#: Shares of the usable CPUs that other processes keep busy.
BUSY_WARN, BUSY_FAIL = 0.10, 0.75
STEAL_WARN = 0.02
SAMPLE_S = 1.0

_PROBE = "#include <omp.h>\n#include <Python.h>\nint main() { return omp_get_max_threads() == 0; }\n"


@dataclass(frozen=True)
class Check:
    """One finding. ``advice`` says what to do; None where nothing needs doing."""

    name: str
    state: State
    finding: str
    advice: str | None = None


def examine(results: Path, root: Path = Path("/")) -> list[Check]:
    """All checks of this host. Takes a second or two.

    Args:
        results: the store's folder, whose disk is checked.
        root: where ``proc`` and ``sys`` are looked for.
    """
    return [check for part in _PARTS for check in part(results, root)]


def exit_code(checks: list[Check]) -> int:
    """3 if a run would be meaningless, else 0."""
    return 3 if any(check.state == "fail" for check in checks) else 0


def require_toolchain() -> None:
    """Raise ToolchainMissing, with what to install, unless C++ for this host can be compiled."""
    for check in _toolchain(Path(), Path("/")):
        if check.state == "fail":
            raise ToolchainMissing(f"{check.finding}; {check.advice}")


def table(checks: list[Check]) -> Table:
    """The checks as a table for a terminal."""
    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    result = Table("check", "state", "finding", "what to do", title="harness doctor", title_justify="left")
    for check in checks:
        state = Text(check.state, style=colours[check.state])
        result.add_row(Text(check.name), state, Text(check.finding), Text(check.advice or ""))
    return result


def _instruction_sets(_: Path, __: Path) -> Iterator[Check]:
    names = isa.supported()
    if not names:
        yield Check("ISA", "fail", f"{isa.cpu_model()} has no AVX2", "use an x86-64 CPU with AVX2 and FMA, or better")
        return
    lacking = [name for name in isa.NAMES if name not in names]
    found = f"{isa.cpu_model()}: {', '.join(names)}"
    if "vnni" in names:
        yield Check("ISA", "ok", found)
    else:
        advice = "INT8 is slow without VNNI and keeps weights to 7 bits; measure on a Xeon with VNNI or AMX"
        yield Check("ISA", "warn", f"{found}; lacking {', '.join(lacking)}", advice)
    amx = str(isa.describe()["amx"])
    if amx == "denied":
        advice = "allow arch_prctl(ARCH_REQ_XCOMP_PERM) in the container's seccomp policy, or use a kernel from 5.16 on"
        yield Check("AMX permission", "warn", "the CPU has AMX, but the kernel denies it", advice)
    else:
        yield Check("AMX permission", "ok", amx)


def _toolchain(_: Path, __: Path) -> Iterator[Check]:
    command = fingerprint.compiler()
    if shutil.which(command) is None:
        advice = "install it (Debian: apt install g++), or name one in CXX"
        yield Check("C++ compiler", "fail", f"no C++ compiler: {command} is not on the PATH", advice)
        return
    refused = {name: problem for name in isa.supported() if (problem := compile_problem(command, march(name)))}
    if not refused:
        yield Check("C++ compiler", "ok", f"{command} compiles for {', '.join(isa.supported())}")
        return
    name, problem = next(iter(refused.items()))
    if "Python.h" in problem:
        yield Check("Python headers", "fail", "Python.h is missing", f"apt install python{_minor()}-dev, or the like")
    elif "omp.h" in problem or "fopenmp" in problem:
        advice = "install the compiler's OpenMP (for clang: apt install libomp-dev)"
        yield Check("C++ compiler", "fail", f"{command} has no OpenMP", advice)
    else:
        state: State = "fail" if len(refused) == len(isa.supported()) else "warn"
        finding = f"{command} cannot compile for {', '.join(refused)} ({march(name)}: {problem})"
        yield Check("C++ compiler", state, finding, "install g++ 12 or newer, or name another compiler in CXX")


def march(name: str) -> str:
    """The compiler's flag for an ISA that this host has: the one that Inductor is given."""
    return f"-march={isa.environment(name).get('TORCHINDUCTOR_CPP_MARCH', 'native')}"


def compile_problem(command: str, *flags: str) -> str | None:
    """What the compiler ``command`` says against a small program with OpenMP and Python's headers; None if nothing."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(_PROBE)
        include = f"-I{sysconfig.get_paths()['include']}"
        line = [command, *flags, "-fopenmp", include, "-c", str(source), "-o", str(Path(folder) / "probe.o")]
        try:
            answer = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
    if answer.returncode == 0:
        return None
    errors = [text for text in answer.stderr.splitlines() if "error" in text.lower()]
    return (errors or answer.stderr.splitlines() or ["it failed and said nothing"])[0].replace(str(source), "probe.cpp")


def _minor() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def _disk(results: Path, _: Path) -> Iterator[Check]:
    folder = results.absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield Check("disk", "warn", f"the disk of {results} cannot be asked: {error.strerror}")
        return
    advice = f"free some space on the disk of {results}, or choose another folder with --results"
    yield _below("disk", free, DISK_WARN_BYTES, DISK_FAIL_BYTES, "free", advice)


def _memory(_: Path, root: Path) -> Iterator[Check]:
    available = fingerprint.collect_field("memory_available_bytes", root)
    if not isinstance(available, int):
        return
    limit = fingerprint.memory_limit_bytes(root)
    found = available if limit is None else min(available, limit)
    yield _below("memory", found, MEMORY_WARN_BYTES, MEMORY_FAIL_BYTES, "available", "stop other programs")


def _below(name: str, found: int, warn: int, fail: int, word: str, advice: str) -> Check:
    state: State = "fail" if found < fail else "warn" if found < warn else "ok"
    return Check(name, state, f"{found / GIB:.1f} GiB {word}", None if state == "ok" else advice)


def _frequency(_: Path, root: Path) -> Iterator[Check]:
    governor = fingerprint.collect_field("governor", root)
    if governor is None:
        yield Check("governor", "ok", "not visible here (a virtual machine, most likely)")
    elif governor == "performance":
        yield Check("governor", "ok", "performance")
    else:
        yield Check("governor", "warn", str(governor), "cpupower frequency-set -g performance")


def _load(_: Path, root: Path) -> Iterator[Check]:
    """Busy and stolen time over one second: the load average still remembers what ended a minute ago."""
    before = _cpu_seconds(root)
    time.sleep(SAMPLE_S)
    after = _cpu_seconds(root)
    if before is None or after is None:
        return
    cpus = fingerprint.usable_threads(root)
    busy = max(0.0, after[0] - before[0]) / SAMPLE_S / cpus
    stolen = max(0.0, after[1] - before[1]) / SAMPLE_S / cpus
    state: State = "fail" if busy > BUSY_FAIL else "warn" if busy > BUSY_WARN else "ok"
    advice = "stop other programs, or wait for them to end"
    yield Check("other load", state, f"{busy:.0%} of {cpus} CPUs are busy", None if state == "ok" else advice)
    if stolen > STEAL_WARN:
        yield Check("steal", "warn", f"{stolen:.0%} of the time goes to other guests", "use a host with dedicated CPUs")


def _cpu_seconds(root: Path) -> tuple[float, float] | None:
    busy, stolen = (fingerprint.collect_field(name, root) for name in ("cpu_busy_s", "steal_s"))
    return (busy, stolen) if isinstance(busy, float) and isinstance(stolen, float) else None


def _threads(_: Path, root: Path) -> Iterator[Check]:
    threads, quota = fingerprint.usable_threads(root), fingerprint.cgroup_quota(root)
    if quota is None:
        yield Check("threads", "ok", f"{threads} usable, no cgroup quota")
    elif quota != threads and quota < len(os.sched_getaffinity(0)):
        advice = "give the container whole CPUs: a quota stops its threads in the middle of an iteration"
        yield Check("threads", "warn", f"{threads} usable within a cgroup quota of {quota:g} CPUs", advice)
    else:
        yield Check("threads", "ok", f"{threads} usable within a cgroup quota of {quota:g} CPUs")


def _assets(_: Path, __: Path) -> Iterator[Check]:
    missing = []
    for name, asset in assets.known().items():
        if not (assets.root() / asset.folder).exists():
            missing.append(name)
            continue
        try:
            assets.ensure(name, offline=True)
        except AssetError as error:
            yield Check("assets", "fail", str(error), "delete the folder and run `harness fetch`")
    if missing:
        yield Check("assets", "warn", f"not fetched yet: {', '.join(missing)}", "harness fetch")
    else:
        yield Check("assets", "ok", f"{', '.join(assets.known())} in place")


def _versions(_: Path, __: Path) -> Iterator[Check]:
    path = fingerprint.lock_file()
    if path is None:
        yield Check("versions", "ok", "no lock file beside the packages")
        return
    differing = list(version_differences(path.read_text(encoding="utf-8")))
    if not differing:
        yield Check("versions", "ok", "equal to requirements.lock")
        return
    shown = ", ".join(differing[:6]) + (f" and {len(differing) - 6} more" if len(differing) > 6 else "")
    advice = "make env; numbers are comparable only between equal versions"
    yield Check("versions", "warn", f"differ from requirements.lock: {shown}", advice)


def version_differences(lock: str) -> Iterator[str]:
    """What is installed and differs from the text of a lock file, or is missing: ``numpy 2.4.6 (locked: 2.4.5)``."""
    for line in lock.splitlines():
        name, separator, locked = line.partition("==")
        if not separator or line.startswith("#"):
            continue
        try:
            found = metadata.version(name.strip())
        except metadata.PackageNotFoundError:
            yield f"{name.strip()} missing"
            continue
        wanted = locked.split(";")[0].strip()
        # A lock file without a local part (+cpu) is met by every build of that version.
        if found != wanted and found.partition("+")[0] != wanted:
            yield f"{name.strip()} {found} (locked: {wanted})"


_PARTS: tuple[Callable[[Path, Path], Iterator[Check]], ...] = (
    _instruction_sets,
    _toolchain,
    _disk,
    _memory,
    _frequency,
    _load,
    _threads,
    _assets,
    _versions,
)
