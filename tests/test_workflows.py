"""The workflows are valid, safe, and do nothing that does not also run locally."""

from __future__ import annotations

import re
import shutil
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


def test_there_are_workflows_for_nights_changes_upgrades_and_the_site() -> None:
    assert {path.stem for path in WORKFLOWS} == {"nightly", "pull-request", "site", "upgrade"}


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


def test_nights_are_shared_out_and_their_shards_are_all_of_the_matrix() -> None:
    job = _load(ROOT / ".github" / "workflows" / "nightly.yml")["jobs"]["measure"]
    shards = job["strategy"]["matrix"]["shard"]
    assert shards == [f"{n}/{len(shards)}" for n in range(1, len(shards) + 1)]
    assert job["env"]["SHARD"] == "${{ matrix.shard }}"
    names = [step["with"]["name"] for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
    assert all("strategy.job-index" in name for name in names), "two shards would write one artifact"


def test_only_jobs_that_run_no_unread_code_may_write() -> None:
    jobs = {f"{path.stem}/{name}": job for path in WORKFLOWS for name, job in _load(path)["jobs"].items()}
    writing = {name: job for name, job in jobs.items() if "write" in job["permissions"].values()}
    expected = (
        "nightly/keep",
        "nightly/publish",
        "nightly/tell",
        "pull-request/comment",
        "site/deploy",
        "upgrade/tell",
    )
    assert sorted(writing) == sorted(expected)
    assert {job.get("runs-on", "ubuntu-latest") for job in writing.values()} == {"ubuntu-latest"}


@pytest.mark.parametrize(("code", "noted"), [(0, False), (1, True), (2, True), (3, False), (4, False)])
def test_a_night_is_noted_if_it_fails_and_not_if_it_cannot_tell(tmp_path: Path, code: int, noted: bool) -> None:
    """The recipe of `make verdict`, with a harness that gates as told."""
    harness = tmp_path / "bin" / "harness"
    harness.parent.mkdir()
    harness.write_text(f'#!/bin/bash\nwhile [ "$1" != --markdown ]; do shift; done\necho said > "$2"\nexit {code}\n')
    harness.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "requirements.lock"):
        (tmp_path / name).touch()
    command = ["make", "-o", "stamp", "verdict", f"BIN={harness.parent}", "STAMP=stamp", "NAME=amx-0"]
    (tmp_path / "stamp").touch()
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "alarms" / "amx-0.md").exists() == noted


def test_an_upgrade_that_passed_becomes_the_branch_upgrade(tmp_path: Path) -> None:
    """The script of `make upgrade-tell`, on a clone with a remote of its own."""

    def git(*arguments: str, cwd: Path = tmp_path / "clone") -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *who, *arguments], cwd=cwd, capture_output=True, text=True, check=True).stdout

    git("init", "--quiet", "--bare", "origin", cwd=tmp_path)
    git("clone", "--quiet", "origin", "clone", cwd=tmp_path)
    clone = tmp_path / "clone"
    (clone / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "push-upgrade", clone / ".ci")
    (clone / ".gitignore").write_text("build/\n")
    for text in ("a==1\n", "a==2\n"):
        (clone / "requirements.lock").write_text(text)
        git("add", ".")
        git("commit", "--quiet", "-m", f"Upgrade to {text.strip()}")
    (clone / "build" / "upgrade").mkdir(parents=True)
    (clone / "build" / "upgrade" / "upgrade.patch").write_text(git("format-patch", "--stdout", "-1", "HEAD"))
    git("reset", "--quiet", "--hard", "HEAD~1")
    before = git("rev-parse", "HEAD")
    result = subprocess.run([clone / ".ci" / "push-upgrade"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert git("show", "upgrade:requirements.lock", cwd=tmp_path / "origin") == "a==2\n"
    assert git("log", "-1", "--format=%s", "upgrade", cwd=tmp_path / "origin") == "Upgrade to a==2\n"
    assert git("rev-parse", "upgrade~1", cwd=tmp_path / "origin") == before
    assert git("rev-parse", "HEAD") == before and git("status", "--porcelain") == ""


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
