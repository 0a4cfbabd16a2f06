"""Revisions as folders that can be run: real git repositories, and the environment of a lock file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness import revisions
from harness.errors import UsageError
from harness.revisions import WORKTREE


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Two commits of something with a harness, and an uncommitted change."""
    root = tmp_path / "project"
    (root / "harness").mkdir(parents=True)
    git(root, "init", "--quiet", "--initial-branch=main")
    (root / ".gitignore").write_text(".cache/\n")
    (root / "requirements.lock").write_text("")
    worker = root / "harness" / "worker.py"
    for text in ("first", "second"):
        worker.write_text(f"# {text}\n")
        git(root, "add", "--all")
        git(root, "commit", "--quiet", "--message", text)
    worker.write_text("# uncommitted\n")
    return root


def test_a_commit_is_checked_out_beside_the_tree_which_stays_as_it_is(project: Path) -> None:
    found = revisions.check_out("HEAD~1", project)
    assert found.commit == git(project, "rev-parse", "HEAD~1")
    assert (found.home.tree / "harness" / "worker.py").read_text() == "# first\n"
    assert found.home.tree.is_relative_to(project / ".cache")
    assert found.home.python == Path(sys.executable)
    assert (project / "harness" / "worker.py").read_text() == "# uncommitted\n"
    assert git(project, "status", "--porcelain") == "M harness/worker.py"
    assert git(project, "branch", "--show-current") == "main"


def test_a_checkout_is_reused_and_a_changed_one_made_anew(project: Path) -> None:
    tree = revisions.check_out("HEAD", project).home.tree
    (tree / "built").write_text("by a worker")
    assert (revisions.check_out("HEAD", project).home.tree / "built").exists()
    (tree / "harness" / "worker.py").write_text("# tampered\n")
    again = revisions.check_out("HEAD", project).home.tree
    assert again == tree
    assert (tree / "harness" / "worker.py").read_text() == "# second\n"


def test_worktree_is_the_tree_as_it_lies_there(project: Path) -> None:
    found = revisions.check_out(WORKTREE, project)
    assert (found.commit, found.home.tree) == (None, project)


@pytest.mark.parametrize("name", ["no-such-branch", "--help", "HEAD~50"])
def test_what_is_no_revision_is_a_usage_error(project: Path, name: str) -> None:
    with pytest.raises(UsageError, match="no revision"):
        revisions.check_out(name, project)


def test_a_revision_without_a_harness_is_refused(project: Path) -> None:
    git(project, "rm", "--quiet", "--force", "harness/worker.py")
    git(project, "commit", "--quiet", "--message", "gone")
    with pytest.raises(UsageError, match="no harness"):
        revisions.check_out("HEAD", project)


def test_another_lock_file_gets_an_environment_of_its_own_once(project: Path) -> None:
    (project / "requirements.lock").write_text("# nothing at all\n")
    said: list[str] = []
    found = revisions.check_out("HEAD", project, said.append)
    assert found.home.python.is_relative_to(project / ".cache" / "environments")
    version = subprocess.run([found.home.python, "-c", "print(1)"], capture_output=True, text=True, check=True)
    assert version.stdout == "1\n"
    assert len(said) == 1
    again = revisions.check_out("HEAD~1", project, said.append)
    assert again.home.python == found.home.python and len(said) == 1
    assert revisions.same_environment(found, again)
    assert not revisions.same_environment(found, revisions.check_out(WORKTREE, project))


def test_an_environment_that_cannot_be_installed_is_one_line(project: Path) -> None:
    (project / "requirements.lock").write_text("./no-such-folder\n")
    git(project, "commit", "--quiet", "--all", "--message", "wrong lock")
    (project / "requirements.lock").write_text("")
    with pytest.raises(revisions.RevisionError, match=r"environment of .* could not be made"):
        revisions.check_out("HEAD", project)
