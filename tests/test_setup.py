"""The set-up: the lock file, its maker, the check of the host, and how results are kept."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
CI = ROOT / ".ci"


def _pins(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def _lock() -> dict[str, str]:
    return _pins((ROOT / "requirements.lock").read_text(encoding="utf-8"))


def _run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]


def test_lock_holds_pins_and_nothing_else() -> None:
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert "://" not in text
    for line in text.splitlines():
        assert re.fullmatch(r"#.*|[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), line


def test_lock_meets_every_requirement_of_the_project() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = pyproject["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"] + pyproject["build-system"]["requires"]
    pins = _lock()
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement


def test_lock_has_the_agreed_torch() -> None:
    pins = _lock()
    assert (pins["torch"], pins["torchao"], pins["asv"]) == ("2.13.0", "0.18.0", "0.6.6")


def test_lock_leaves_out_what_one_build_of_torch_alone_needs() -> None:
    unwanted = ["nvidia-cublas==13.0", "cuda-toolkit==13.0", "triton==3.5", "pip==23.0", "-e git+x#egg=y"]
    frozen = "\n".join(["torch==2.13.0+cpu", *unwanted, "Abc==1.0", ""])
    result = _run(CI / "write-lock", input=frozen)
    assert _pins(result.stdout) == {"torch": "2.13.0", "abc": "1.0"}


def test_host_check_names_everything_that_is_missing(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\ncase $1 in -V) echo Python 3.9.2 ;; *) exit 1 ;; esac\n", encoding="utf-8")
    old.chmod(0o755)
    result = _run(CI / "check-host", old, env={**os.environ, "CXX": "no-such-compiler"})
    assert result.returncode == 69
    assert "3.9.2" in result.stderr
    assert "no-such-compiler" in result.stderr
    assert all(line.startswith("error: ") for line in result.stderr.splitlines())


def test_host_check_names_a_missing_python() -> None:
    result = _run(CI / "check-host", "no-such-python")
    assert (result.returncode, "no-such-python" in result.stderr) == (69, True)


@pytest.mark.parametrize("target", ["nightly", "test"])
def test_make_reinstalls_nothing_while_the_lock_is_unchanged(tmp_path: Path, target: str) -> None:
    """An environment with a stamp for this lock file and place is taken as it is; a changed lock file is installed."""
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    asked = _run("make", "--dry-run", target, cwd=tmp_path)
    stamp = re.search(r"touch (\S+)", asked.stdout)
    assert stamp, asked.stderr
    (tmp_path / ".venv").mkdir()
    (tmp_path / stamp[1]).touch()
    assert "pip" not in _run("make", "--dry-run", target, cwd=tmp_path).stdout
    with (tmp_path / "requirements.lock").open("a", encoding="utf-8") as lock:
        lock.write("something==1.0\n")
    assert "install" in _run("make", "--dry-run", target, cwd=tmp_path).stdout


@pytest.fixture
def checkouts(tmp_path: Path) -> tuple[Path, Path]:
    """Two clones of one remote, each with the script that keeps results."""
    remote = tmp_path / "remote"
    _git(tmp_path, "init", "--quiet", "--bare", str(remote))
    first, second = tmp_path / "first", tmp_path / "second"
    _git(tmp_path, "clone", "--quiet", str(remote), str(first))
    (first / ".ci").mkdir()
    shutil.copy(CI / "history", first / ".ci")
    _git(first, "add", ".")
    _git(first, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "Add the script")
    _git(first, "push", "--quiet", "origin", "HEAD")
    _git(tmp_path, "clone", "--quiet", str(remote), str(second))
    return first, second


def _git(where: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=where, check=True, capture_output=True)


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def _history(checkout: Path, verb: str) -> subprocess.CompletedProcess[str]:
    return _run(checkout / ".ci" / "history", verb, "results", cwd=checkout)


def test_results_of_two_hosts_are_kept_as_their_union(checkouts: tuple[Path, Path]) -> None:
    first, second = checkouts
    assert _history(first, "pull").returncode == 0  # nothing is kept yet: no error
    _write(first / "results", {"runs/1.jsonl": "one", "outputs/1/big.npz": "big", "asv/m/benchmarks.json": "old"})
    _write(second / "results", {"runs/2.jsonl": "two", "accepted/2.json": "yes", "asv/m/benchmarks.json": "new"})
    assert [_history(checkout, "push").returncode for checkout in checkouts] == [0, 0]
    assert _history(first, "pull").returncode == 0
    kept = {"runs/1.jsonl", "runs/2.jsonl", "accepted/2.json", "asv/m/benchmarks.json"}
    assert _files(first / "results") == kept | {"outputs/1/big.npz"}
    assert (first / "results/runs/1.jsonl").read_text(encoding="utf-8") == "one"
    again = _history(first, "push")
    assert again.returncode == 0


def test_a_changed_record_is_never_kept(checkouts: tuple[Path, Path]) -> None:
    first, second = checkouts
    _write(first / "results", {"runs/1.jsonl": "measured"})
    assert _history(first, "push").returncode == 0
    _write(second / "results", {"runs/1.jsonl": "changed"})
    refused = _history(second, "push")
    assert refused.returncode == 74
    assert "runs/1.jsonl" in refused.stderr
    shutil.rmtree(second / "results")
    assert _history(second, "pull").returncode == 0
    assert (second / "results/runs/1.jsonl").read_text(encoding="utf-8") == "measured"
