"""asv itself, run on a small repository: samples are kept, and nothing saved is a failure.

The suite of the repository is made here; the plugin and the check are the project's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUITE = '''
class Cell:
    params = [["have", "lack"]]
    param_names = ["isa"]
    version = "1"

    def setup_cache(self):
        return {"have": [1.0, 2.0, 3.0, 4.0, 10.0] * 3}

    def setup(self, cache, isa):
        if isa not in cache:
            raise NotImplementedError("this host does not measure it")

    def track_seconds(self, cache, isa):
        return {"samples": cache[isa], "number": 1}
'''
#: Numbers of the profile smoke on any host: its three recipes, under the one ISA it resolves to.
SMOKE_CELLS = 3
BROKEN = SUITE.replace('return {"samples": cache[isa], "number": 1}', 'raise RuntimeError("not fused")')


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A git repository with a suite, whose asv configuration names the plugin as the project's own does."""
    root = tmp_path / "project"
    (root / "benchmarks").mkdir(parents=True)
    for name in ("__init__.py", "check.py", "asv_plugin.py"):
        shutil.copy(ROOT / "benchmarks" / name, root / "benchmarks")
    (root / "benchmarks" / "suite.py").write_text(SUITE, encoding="utf-8")
    own = _uncommented((ROOT / "asv.conf.json").read_text(encoding="utf-8"))
    own_packages = ("build_command", "install_command")
    config = {name: value for name, value in own.items() if name not in own_packages}
    (root / "asv.conf.json").write_text(json.dumps(config), encoding="utf-8")
    (root / ".gitignore").write_text("results/\n__pycache__/\n", encoding="utf-8")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "Add the suite"]):
        subprocess.run([*git, *command], cwd=root, check=True)
    _asv(root, "machine", "--yes")
    return root


def _uncommented(text: str) -> dict[str, Any]:
    lines = [line for line in text.splitlines() if not line.strip().startswith("//")]
    loaded: dict[str, Any] = json.loads("\n".join(lines))
    return loaded


def _asv(
    root: Path, *arguments: str, settings: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    # A home of its own: asv keeps the machine's description there.
    environment = {**os.environ, "HOME": str(root.parent), **settings}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-m", "asv", *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def _run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return _asv(root, "run", "--environment", "existing", *arguments)


def _check(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.check"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def _stored(root: Path) -> dict[str, Any]:
    (file,) = (root / "results" / "asv").glob("*/*-existing-*.json")
    data = json.loads(file.read_text(encoding="utf-8"))
    (values,) = data["results"].values()
    return dict(zip(data["result_columns"], values, strict=False))


def test_tracked_samples_are_stored_with_their_interval(project: Path) -> None:
    result = _run(project, "--set-commit-hash", "HEAD")
    assert result.returncode == 0, result.stdout + result.stderr
    stored = _stored(project)
    assert stored["result"][0] == 3.0
    assert stored["samples"] == [[1.0, 2.0, 3.0, 4.0, 10.0] * 3, None]
    assert stored["stats_ci_99_a"][0] < 3.0 < stored["stats_ci_99_b"][0]
    checked = _check(project)
    assert checked.returncode == 0, checked.stderr
    assert "1 numbers" in checked.stdout


def test_results_are_published(project: Path) -> None:
    _run(project, "--set-commit-hash", "HEAD")
    published = _asv(project, "publish", "--html-dir", "site/asv")
    assert published.returncode == 0, published.stdout + published.stderr
    assert (project / "site" / "asv" / "index.html").is_file()
    assert list((project / "site" / "asv" / "graphs").rglob("suite.Cell.track_seconds.json"))


def test_a_run_that_saves_nothing_fails(project: Path) -> None:
    result = _run(project)  # without --set-commit-hash
    assert result.returncode == 1
    assert "--set-commit-hash" in result.stderr
    assert _check(project).returncode == 1


def test_results_that_are_all_not_available_count_for_nothing(project: Path) -> None:
    suite = project / "benchmarks" / "suite.py"
    suite.write_text(SUITE.replace('["have", "lack"]', '["lack"]'), encoding="utf-8")
    result = _run(project, "--set-commit-hash", "HEAD")
    assert (result.returncode, "no number was saved" in result.stderr) == (1, True)
    assert _check(project).returncode == 1


def test_a_failed_benchmark_fails_the_run(project: Path) -> None:
    (project / "benchmarks" / "suite.py").write_text(BROKEN, encoding="utf-8")
    assert _run(project, "--set-commit-hash", "HEAD").returncode == 2
    assert _check(project).returncode == 1


@pytest.mark.slow
@pytest.mark.assets
@pytest.mark.timeout(1800)
def test_own_suite_measures_this_host(tmp_path: Path) -> None:
    """The whole way on the smallest profile: harness, records, asv, pages; in a clone with results of its own."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    assets = os.environ.get("INT8_ASSETS") or str(ROOT / ".assets")
    settings = {"INT8_ASV_PROFILE": "smoke", "INT8_ASSETS": assets}
    _asv(clone, "machine", "--yes")
    result = _asv(
        clone, "run", "--environment", "existing", "--set-commit-hash", "HEAD", "--show-stderr", settings=settings
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (file,) = (clone / "results" / "asv").glob("*/*-existing-*.json")
    results = json.loads(file.read_text(encoding="utf-8"))
    stored = {
        name: dict(zip(results["result_columns"], values, strict=False)) for name, values in results["results"].items()
    }
    numbers = {
        name.rpartition(".")[2]: [value for value in columns["result"] if value is not None and value == value]
        for name, columns in stored.items()
    }
    for name in ("track_seconds_per_sequence", "track_latency_p50", "track_accuracy_drop", "track_model_bytes"):
        assert len(numbers[name]) == SMOKE_CELLS, numbers
    assert len(numbers["track_quantize_s"]) >= SMOKE_CELLS - 1  # fp32 quantizes nothing
    samples = next(columns["samples"] for name, columns in stored.items() if name.endswith("seconds_per_sequence"))
    assert sum(bool(kept) for kept in samples) == SMOKE_CELLS
    published = _asv(clone, "publish", "--html-dir", "site/asv")
    assert published.returncode == 0, published.stdout + published.stderr
    assert list((clone / "site" / "asv" / "graphs").rglob("cells.Cell.track_seconds_per_sequence.json"))
