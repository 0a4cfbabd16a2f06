"""The fingerprint, read from made-up /proc and /sys trees and from this host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import fingerprint

CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8480+
stepping\t: 8
microcode\t: 0x2b000590
cpu MHz\t\t: 2000.000
flags\t\t: fpu avx2 hypervisor

processor\t: 1
model name\t: another
"""


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_cpu_is_read(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", CPUINFO)
    cpu = "sys/devices/system/cpu"
    write(tmp_path, f"{cpu}/online", "0-3,8-9\n")
    write(tmp_path, f"{cpu}/smt/active", "1\n")
    write(tmp_path, f"{cpu}/intel_pstate/no_turbo", "1\n")
    write(tmp_path, f"{cpu}/cpu0/cpufreq/scaling_governor", "powersave\n")
    for index, (level, kind, size) in enumerate(
        [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2048K"), ("3", "Unified", "105M")]
    ):
        for name, text in (("level", level), ("type", kind), ("size", size)):
            write(tmp_path, f"{cpu}/cpu0/cache/index{index}/{name}", text + "\n")
    write(tmp_path, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    for node in ("node0", "node1"):
        (tmp_path / "sys/devices/system/node" / node).mkdir(parents=True)
    write(tmp_path, "proc/meminfo", "MemTotal:  1000 kB\nMemAvailable:    500 kB\n")
    write(tmp_path, "proc/loadavg", "1.25 0.5 0.2 1/100 5\n")
    write(tmp_path, "proc/stat", "cpu  100 20 30 4000 50 6 7 800 0 0\ncpu0 1 2 3\n")
    host = fingerprint.collect(tmp_path)
    ticks = os.sysconf("SC_CLK_TCK")
    expected = {
        "cpu_model": "Intel(R) Xeon(R) Platinum 8480+",
        "cpu_vendor": "GenuineIntel",
        "cpu_family": "6",
        "cpu_model_number": "143",
        "cpu_stepping": "8",
        "microcode": "0x2b000590",
        "hypervisor": True,
        "cores_online": 6,
        "smt": True,
        "turbo": False,
        "governor": "powersave",
        "l1d_bytes": 48 * 1024,
        "l2_bytes": 2 * 1024**2,
        "l3_bytes": 105 * 1024**2,
        "transparent_huge_pages": "madvise",
        "numa_nodes": 2,
        "memory_total_bytes": 1024_000,
        "load_1min": 1.25,
        "steal_s": 800 / ticks,
        "cpu_busy_s": (100 + 20 + 30 + 6 + 7) / ticks,
    }
    assert {name: host[name] for name in expected} == expected


def test_what_is_missing_is_none_and_never_an_error(tmp_path: Path) -> None:
    host = fingerprint.collect(tmp_path)
    assert host.keys() == {field.name for field in fingerprint.FIELDS}
    for name in (
        "cpu_model",
        "microcode",
        "governor",
        "turbo",
        "smt",
        "l2_bytes",
        "load_1min",
        "steal_s",
        "numa_nodes",
    ):
        assert host[name] is None, name
    write(tmp_path, "proc/cpuinfo", "nonsense")
    write(tmp_path, "proc/stat", "")
    write(tmp_path, "proc/loadavg", "?")
    write(tmp_path, "sys/devices/system/cpu/online", "a-b")
    assert fingerprint.collect(tmp_path)["cores_online"] is None


@pytest.mark.parametrize(
    ("cgroup", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {"cpu.max": "200000 100000"}, 2.0),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000", "a/cpu.max": "150000 100000"}, 0.5),
        # The path of the host, which a container does not see: its own cgroup is mounted at the root.
        ("0::/docker/abc\n", {"cpu.max": "300000 100000"}, 3.0),
        (
            "4:memory:/x\n2:cpu,cpuacct:/x\n",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "400000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
            4.0,
        ),
        ("2:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("3:cpuset:/\n0::/\n", {"cpu.max": "100000 0"}, None),
        ("", {}, None),
    ],
)
def test_the_cgroup_quota(tmp_path: Path, cgroup: str, files: dict[str, str], quota: float | None) -> None:
    write(tmp_path, "proc/self/cgroup", cgroup)
    for name, text in files.items():
        write(tmp_path, f"sys/fs/cgroup/{name}", text + "\n")
    assert fingerprint.cgroup_quota(tmp_path) == quota


def test_threads_keep_within_the_quota_and_the_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for text, threads in (("max 100000", 64), ("200000 100000", 2), ("250000 100000", 2), ("50000 100000", 1)):
        write(tmp_path, "sys/fs/cgroup/cpu.max", text)
        assert fingerprint.usable_threads(tmp_path) == threads
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    write(tmp_path, "sys/fs/cgroup/cpu.max", "800000 100000")
    assert fingerprint.usable_threads(tmp_path) == 1


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        ("0::/a\n", {"a/memory.max": "max", "memory.max": "1000"}, 1000),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "2000"}, 2000),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, None),
    ],
)
def test_the_memory_limit(tmp_path: Path, cgroup: str, files: dict[str, str], limit: int | None) -> None:
    write(tmp_path, "proc/self/cgroup", cgroup)
    for name, text in files.items():
        write(tmp_path, f"sys/fs/cgroup/{name}", text + "\n")
    assert fingerprint.memory_limit_bytes(tmp_path) == limit


@pytest.mark.parametrize(
    ("text", "numbers"), [("0", [0]), ("0-2", [0, 1, 2]), ("0-1,4,6-7\n", [0, 1, 4, 6, 7]), ("", [])]
)
def test_lists_of_cpus(text: str, numbers: list[int]) -> None:
    assert fingerprint.parse_cpu_list(text) == numbers


def test_only_comparable_fields_make_the_id() -> None:
    host = fingerprint.collect()
    made = fingerprint.comparable_id(host)
    assert len(made) == 12 and int(made, 16) >= 0
    assert made == fingerprint.comparable_id(dict(reversed(host.items())))
    for field in fingerprint.FIELDS:
        changed = fingerprint.comparable_id(host | {field.name: "something else"})
        assert (changed != made) == field.comparable, field.name
    assert fingerprint.differences(host, host | {"microcode": "0x1", "kernel": "x"}) == {
        "microcode": (host["microcode"], "0x1")
    }


def test_the_id_survives_the_store() -> None:
    host = fingerprint.collect()
    assert fingerprint.comparable_id(json.loads(json.dumps(host))) == fingerprint.comparable_id(host)


def test_this_host_is_read() -> None:
    host = fingerprint.collect()
    for name in ("cores_online", "affinity_cpus", "usable_threads", "kernel", "memory_total_bytes", "load_1min"):
        assert host[name] is not None, name
    assert 1 <= host["usable_threads"] <= host["affinity_cpus"]
    assert str(host["torch_build"]).startswith("2.13.0")
    assert not any(isinstance(value, str) and value.startswith("/") for value in host.values()), "no paths of this host"


def test_preloaded_libraries_are_named_without_their_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/opt/x/libtcmalloc.so.4:/usr/lib/libiomp5.so")
    host = fingerprint.collect()
    assert host["preload"] == ["libiomp5.so", "libtcmalloc.so.4"]
    assert host["allocator"] == "tcmalloc"
    assert host["openmp"] == "libiomp5"


def test_versions_name_what_is_installed_only() -> None:
    found = fingerprint.versions()
    assert found["torch"].startswith("2.13.0") and found["torchao"] == "0.18.0"
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert all(found.values())
    assert fingerprint.installed("no-such-distribution") is None


def git(folder: Path, *arguments: str) -> str:
    names = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    return subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_the_commit_and_whether_files_differ_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "project_root", lambda: tmp_path)
    assert fingerprint.git_commit() == (None, None)
    git(tmp_path, "init", "-q")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "int8-harness"\n')
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    assert fingerprint.git_commit() == (commit, False)
    (tmp_path / "untracked").write_text("x")
    assert fingerprint.git_commit() == (commit, False)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "int8-harness"\n\n')
    assert fingerprint.git_commit() == (commit, True)


def test_the_commit_of_another_project_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "project_root", lambda: tmp_path)
    git(tmp_path, "init", "-q")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    assert fingerprint.git_commit() == (None, None)


def test_a_missing_git_or_compiler_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert fingerprint.git_commit() == (None, None)
    assert fingerprint.collect()["compiler"] is None


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from harness import fingerprint as f; f.collect(); f.versions(); sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
