"""The workflows are valid, safe, and do nothing that does not also run locally."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
BIN = Path(sys.executable).parent


def _load(path: Path) -> dict[str, Any]:
    return yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # BaseLoader: `on` stays a word


def _steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


def _make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def _tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / name), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_there_are_workflows_for_nights_changes_and_the_site() -> None:
    assert {path.stem for path in WORKFLOWS} == {"nightly", "pull-request", "site"}


def test_schema_is_met() -> None:
    result = _tool("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS)
    assert result.returncode == 0, result.stdout + result.stderr


def test_schema_check_would_notice(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yml"
    broken.write_text(WORKFLOWS[0].read_text(encoding="utf-8").replace("runs-on:", "run-on:"), encoding="utf-8")
    assert _tool("check-jsonschema", "--builtin-schema", "vendor.github-workflows", broken).returncode != 0


def test_security_linter_finds_nothing() -> None:
    result = _tool("zizmor", "--offline", "--quiet", "--strict-collection", ROOT / ".github" / "workflows")
    assert result.returncode == 0, result.stdout + result.stderr


def test_security_linter_would_notice(tmp_path: Path) -> None:
    text = WORKFLOWS[0].read_text(encoding="utf-8").replace("persist-credentials: false", "persist-credentials: true")
    careless = tmp_path / "careless.yml"
    careless.write_text(re.sub(r"@[0-9a-f]{40} # v\S+", "@main", text), encoding="utf-8")
    assert _tool("zizmor", "--offline", "--quiet", careless).returncode != 0


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_step_is_a_command_that_runs_locally(path: Path) -> None:
    targets = _make_targets()
    runs = [step["run"] for step in _steps(_load(path)) if "run" in step]
    assert runs
    for line in (line.strip() for run in runs for line in run.splitlines() if line.strip()):
        if line.startswith("make "):
            assert line.split()[1] in targets, f"no such target: {line}"
        else:
            assert line.startswith(".venv/bin/harness "), f"neither make nor harness: {line}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit_with_their_version_beside(path: Path) -> None:
    uses = re.findall(r"uses: (.+)", path.read_text(encoding="utf-8"))
    pinned_or_own = re.compile(r"\S+@[0-9a-f]{40} # v\d+\.\d+\.\d+|\$/\.github/workflows/\S+\.yml")
    assert all(pinned_or_own.fullmatch(use) for use in uses), uses


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_rights_are_given_job_by_job_and_no_secret_is_used(path: Path) -> None:
    workflow = _load(path)
    assert workflow["permissions"] == {}
    assert all("permissions" in job for job in workflow["jobs"].values())
    assert "secrets." not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_job_that_runs_has_a_time_limit(path: Path) -> None:
    assert all("timeout-minutes" in job or "uses" in job for job in _load(path)["jobs"].values())


def test_pull_requests_reach_the_xeon_hosts_by_a_label_only() -> None:
    jobs = _load(ROOT / ".github" / "workflows" / "pull-request.yml")["jobs"]
    own = [job for job in jobs.values() if "self-hosted" in job["runs-on"]]
    assert own
    assert all("github.event.action == 'labeled'" in job["if"] for job in own)


def test_nights_measure_amx_and_vnni_hosts() -> None:
    measure = _load(ROOT / ".github" / "workflows" / "nightly.yml")["jobs"]["measure"]
    assert measure["runs-on"] == ["self-hosted", "xeon", "${{ matrix.host }}"]
    assert measure["strategy"]["matrix"]["host"] == ["amx", "vnni"]


def test_pre_commit_fetches_nothing() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    assert {repository["repo"] for repository in config["repos"]} == {"local"}
    assert all(hook["language"] == "system" and hook["entry"].startswith(".venv/bin/") for hook in hooks)
    assert _tool("pre-commit", "validate-config", ".pre-commit-config.yaml").returncode == 0
