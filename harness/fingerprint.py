"""What a measurement ran on: the host's fields, the versions of what matters, the commit. Imports no torch.

Every field is one row of a registry: its name, its unit, whether hosts that differ in it can be compared, and how it is
read. What this host does not show is None. The id of a host is a hash of its comparable fields alone: a change in one
of them starts a new series, and a change in any other is recorded and nothing more.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from int8 import isa

Value = str | int | float | bool | list[str] | None

#: Distributions whose versions can change a result.
DISTRIBUTIONS = (
    "int8-harness",
    "torch",
    "torchao",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "scipy",
    "scikit-learn",
    "datasets",
    "evaluate",
    "asv",
    "openvino",
    "nncf",
    "onnx",
    "onnxruntime",
    "ctranslate2",
)


@dataclass(frozen=True)
class Field:
    """One fact about a host.

    Attributes:
        name: its key in the fingerprint.
        unit: of a number; None for names and counts.
        comparable: hosts that differ in it are different hosts.
        read: reads it below the given root of the file system; None where it cannot be known.
    """

    name: str
    unit: str | None
    comparable: bool
    read: Callable[[Path], Value]


def collect(root: Path = Path("/")) -> dict[str, Any]:
    """Every field of this host, by name; None where it could not be read.

    ``root`` is where ``proc`` and ``sys`` are looked for.
    """
    return {field.name: _read(field, root) for field in FIELDS}


def collect_field(name: str, root: Path = Path("/")) -> Value:
    """One field of this host; None where it could not be read. Raises KeyError for a name that is no field."""
    return _read({field.name: field for field in FIELDS}[name], root)


def comparable_id(host: Mapping[str, Any]) -> str:
    """Twelve hex digits that are equal for hosts whose comparable fields are equal."""
    fields = {name: host.get(name) for name in COMPARABLE}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The comparable fields in which two hosts differ, with both values."""
    return {name: (one.get(name), other.get(name)) for name in COMPARABLE if one.get(name) != other.get(name)}


def versions() -> dict[str, str]:
    """Versions of the installed distributions that can change a result, and of Python."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        version = installed(name)
        if version is not None:
            found[name] = version
    return found


def installed(distribution: str) -> str | None:
    """The installed version of a distribution; None where it is missing. Imports nothing of it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def usable_threads(root: Path = Path("/")) -> int:
    """How many threads can really run at once: CPUs of the affinity mask (or cpuset), within the cgroup's quota."""
    cpus = len(os.sched_getaffinity(0))
    quota = cgroup_quota(root)
    return cpus if quota is None else max(1, min(cpus, math.floor(quota)))


def cgroup_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that this process's cgroups grant, the tightest of them; None where nothing limits it."""
    folders = _cgroup_folders(root, "cpu")
    limits = [limit for folder in folders for limit in (_quota_v2(folder), _quota_v1(folder)) if limit is not None]
    return min(limits, default=None)


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process's cgroups grant, the tightest of them; None where nothing limits it."""
    names = ("memory.max", "memory.limit_in_bytes")
    texts = [_text(folder / name) or "" for folder in _cgroup_folders(root, "memory") for name in names]
    # Version 1 writes no limit as a number near 2**63.
    return min((int(text) for text in texts if text.isdigit() and int(text) < 2**60), default=None)


def git_commit() -> tuple[str | None, bool | None]:
    """The commit of this project that is checked out, and whether tracked files differ from it; None if unknown."""
    root = project_root()
    if 'name = "int8-harness"' not in (_text(root / "pyproject.toml") or ""):
        return None, None  # installed without its repository: a commit found here would be that of something else
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return commit, None if commit is None or changes is None else bool(changes)


def project_root() -> Path:
    """The project's folder: the one above the packages, where ``pyproject.toml`` lies; else the current one."""
    above = Path(__file__).resolve().parents[1]
    return above if (above / "pyproject.toml").is_file() else Path.cwd()


def lock_file() -> Path | None:
    """The project's lock file, if there is one."""
    path = project_root() / "requirements.lock"
    return path if path.is_file() else None


# --- readers ----------------------------------------------------------------------------------------------------------


def _read(field: Field, root: Path) -> Value:
    try:
        return field.read(root)
    except (OSError, ValueError, IndexError):
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None


def _cpuinfo(key: str) -> Callable[[Path], Value]:
    def read(root: Path) -> Value:
        match = re.search(rf"^{re.escape(key)}\s*:\s*(.+)$", _text(root / "proc/cpuinfo") or "", re.MULTILINE)
        return match[1].strip() if match else None

    return read


def _file(name: str) -> Callable[[Path], Value]:
    return lambda root: _text(root / name)


def _selected(name: str) -> Callable[[Path], Value]:
    """The bracketed word of a file such as ``always [madvise] never``."""

    def read(root: Path) -> Value:
        match = re.search(r"\[(\w+)\]", _text(root / name) or "")
        return match[1] if match else None

    return read


_CPU = "sys/devices/system/cpu"


def _cores_online(root: Path) -> Value:
    text = _text(root / _CPU / "online")
    return None if text is None else len(parse_cpu_list(text))


def parse_cpu_list(text: str) -> list[int]:
    """CPU numbers of a list as the kernel writes it: ``0-3,8``. Raises ValueError."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _numa_nodes(root: Path) -> Value:
    return len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or None


def _cache(level: int, kind: str) -> Callable[[Path], Value]:
    """Bytes of the first CPU's cache of this level."""

    def read(root: Path) -> Value:
        for folder in sorted((root / _CPU / "cpu0/cache").glob("index*")):
            if _text(folder / "level") == str(level) and _text(folder / "type") in (kind, "Unified"):
                return _bytes(_text(folder / "size"))
        return None

    return read


def _bytes(text: str | None) -> int | None:
    match = re.fullmatch(r"(\d+)([KMG]?)", text or "")
    return int(match[1]) * 1024 ** " KMG".index(match[2] or " ") if match else None


def _turbo(root: Path) -> Value:
    if (off := _text(root / _CPU / "intel_pstate/no_turbo")) is not None:
        return off == "0"
    on = _text(root / _CPU / "cpufreq/boost")
    return None if on is None else on == "1"


def _smt(root: Path) -> Value:
    active = _text(root / _CPU / "smt/active")
    return None if active is None else active == "1"


def _hypervisor(root: Path) -> Value:
    flags = _cpuinfo("flags")(root)
    return None if not isinstance(flags, str) else "hypervisor" in flags.split()


def _memory(key: str) -> Callable[[Path], Value]:
    def read(root: Path) -> Value:
        match = re.search(rf"^{key}:\s*(\d+) kB$", _text(root / "proc/meminfo") or "", re.MULTILINE)
        return int(match[1]) * 1024 if match else None

    return read


def _load(root: Path) -> Value:
    return float((_text(root / "proc/loadavg") or "").split()[0])


def _ticks(*columns: int) -> Callable[[Path], Value]:
    """Seconds since boot in columns of the first line of /proc/stat, summed over CPUs."""

    def read(root: Path) -> Value:
        fields = (_text(root / "proc/stat") or "").splitlines()[0].split()[1:]
        return sum(int(fields[column]) for column in columns) / os.sysconf("SC_CLK_TCK")

    return read


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Folders of this process's cgroups that can hold a limit of ``controller``, each up to its hierarchy's root."""
    folders: list[Path] = []
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        inside = Path(path.lstrip("/"))
        for base in _cgroup_bases(root, controllers, controller):
            # In a container the path may be the host's, which is not visible: then the root is this cgroup.
            folders += [base / part for part in (inside, *inside.parents)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _cgroup_bases(root: Path, controllers: str, wanted: str) -> list[Path]:
    """Where a line of /proc/self/cgroup is mounted: version 2 has no controllers in it, version 1 its own."""
    mounted = root / "sys/fs/cgroup"
    if not controllers:
        return [mounted, mounted / "unified"]
    return [mounted / controllers, mounted / wanted] if wanted in controllers.split(",") else []


def _quota_v2(folder: Path) -> float | None:
    quota, _, period = (_text(folder / "cpu.max") or "").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _quota_v1(folder: Path) -> float | None:
    quota = _text(folder / "cpu.cfs_quota_us") or ""
    period = _text(folder / "cpu.cfs_period_us") or ""
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _compiler(_: Path) -> Value:
    command = compiler()
    try:
        answer = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.splitlines()[0].strip() if answer.returncode == 0 and answer.stdout.strip() else None


def compiler() -> str:
    """The C++ compiler that Inductor calls: ``CXX``, else ``g++``."""
    return os.environ.get("CXX") or "g++"


def _preload(_: Path) -> Value:
    """File names of the preloaded libraries: their folders differ between equal hosts."""
    return sorted(Path(name).name for name in re.split(r"[\s:]+", os.environ.get("LD_PRELOAD", "")) if name)


def _allocator(_: Path) -> Value:
    for name in ("tcmalloc", "jemalloc", "mimalloc"):
        if name in os.environ.get("LD_PRELOAD", ""):
            return name
    return platform.libc_ver()[0] or None


def _openmp(_: Path) -> Value:
    """The OpenMP library that torch will use: a preloaded one, else the one that it ships."""
    if match := re.search(r"lib(iomp5|omp|gomp)\b", os.environ.get("LD_PRELOAD", "")):
        return match[0]
    torch = _torch_folder()
    folders = (torch / "lib", torch.parent / "torch.libs") if torch else ()
    for name in ("libiomp5", "libomp", "libgomp"):
        if any(True for folder in folders for _ in folder.glob(f"{name}[-.]*so*")):
            return name  # without the rest of the file's name, which changes with each build of torch
    return None


@functools.cache
def _torch_folder() -> Path | None:
    found = importlib.util.find_spec("torch")  # finds, does not import
    return Path(found.origin).parent if found and found.origin else None


def _torch_build(_: Path) -> Value:
    """Torch's version with its git commit, read from its files."""
    folder = _torch_folder()
    text = _text(folder / "version.py") if folder else None
    match = re.search(r"^git_version = '([0-9a-f]+)'", text or "", re.MULTILINE)
    version = installed("torch")
    return f"{version} {match[1][:12]}" if version and match else version


def _lock_hash(_: Path) -> Value:
    path = lock_file()
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path else None


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _field(name: str, read: Callable[[Path], Value], unit: str | None = None, *, comparable: bool = False) -> Field:
    return Field(name, unit, comparable, read)


FIELDS: tuple[Field, ...] = (
    _field("cpu_model", _cpuinfo("model name"), comparable=True),
    _field("cpu_vendor", _cpuinfo("vendor_id"), comparable=True),
    _field("cpu_family", _cpuinfo("cpu family"), comparable=True),
    _field("cpu_model_number", _cpuinfo("model"), comparable=True),
    _field("cpu_stepping", _cpuinfo("stepping"), comparable=True),
    _field("microcode", _cpuinfo("microcode"), comparable=True),
    _field("hypervisor", _hypervisor, comparable=True),
    _field("cores_online", _cores_online, comparable=True),
    _field("smt", _smt, comparable=True),
    _field("affinity_cpus", lambda _: len(os.sched_getaffinity(0)), comparable=True),
    _field("cgroup_quota", cgroup_quota, "CPUs", comparable=True),
    _field("usable_threads", usable_threads, comparable=True),
    _field("numa_nodes", _numa_nodes, comparable=True),
    _field("l1d_bytes", _cache(1, "Data"), "bytes", comparable=True),
    _field("l2_bytes", _cache(2, "Unified"), "bytes", comparable=True),
    _field("l3_bytes", _cache(3, "Unified"), "bytes", comparable=True),
    _field("governor", _file(f"{_CPU}/cpu0/cpufreq/scaling_governor"), comparable=True),
    _field("turbo", _turbo, comparable=True),
    _field("transparent_huge_pages", _selected("sys/kernel/mm/transparent_hugepage/enabled"), comparable=True),
    _field("isa_supported", lambda _: list(isa.supported()), comparable=True),
    _field("amx", lambda _: str(isa.describe()["amx"]), comparable=True),
    _field("allocator", _allocator, comparable=True),
    _field("openmp", _openmp, comparable=True),
    _field("preload", _preload, comparable=True),
    _field("memory_total_bytes", _memory("MemTotal"), "bytes"),
    _field("memory_available_bytes", _memory("MemAvailable"), "bytes"),
    _field("memory_limit_bytes", memory_limit_bytes, "bytes"),
    _field("frequency_mhz", _cpuinfo("cpu MHz"), "MHz"),
    _field("kernel", lambda _: platform.release()),
    _field("libc", lambda _: " ".join(platform.libc_ver()).strip() or None),
    _field("compiler", _compiler),
    _field("torch_build", _torch_build),
    _field("lock_hash", _lock_hash),
    _field("load_1min", _load),
    _field("steal_s", _ticks(7), "seconds"),
    _field("cpu_busy_s", _ticks(0, 1, 2, 5, 6), "seconds"),
)

#: Names of the fields that make two hosts comparable.
COMPARABLE: tuple[str, ...] = tuple(field.name for field in FIELDS if field.comparable)
