"""Revisions of this project that can be run beside each other: a folder with the code, and an interpreter for it.

A commit is checked out as a git worktree below ``.cache/revisions``, so that the user's own tree is never touched;
``WORKTREE`` names that tree as it is, uncommitted changes included. Where a revision's lock file is that of this tree,
this interpreter runs it; otherwise an environment is made from its lock file, once, below ``.cache/environments``.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.errors import HarnessError, UsageError
from harness.processes import Home

#: Names the user's tree as it is.
WORKTREE = "WORKTREE"
_LOCK = "requirements.lock"
_INSTALL_TIMEOUT_S = 3600


class RevisionError(HarnessError):
    """A revision's environment could not be made."""

    exit_code = 69


@dataclass(frozen=True)
class Revision:
    """A revision: as it was named, its commit (None for ``WORKTREE``), and what runs it."""

    name: str
    commit: str | None
    home: Home


def resolve(name: str, root: Path) -> str | None:
    """The commit that ``name`` means in the repository at ``root``; None for ``WORKTREE``.

    Raises:
        UsageError: there is no such revision.
    """
    if name == WORKTREE:
        return None
    if name.startswith("-"):
        raise UsageError(f"{name!r} is no revision")
    answer = _git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if answer.returncode != 0:
        raise UsageError(f"{name!r} is no revision of {root}; name a commit, a branch, a tag or {WORKTREE}")
    return answer.stdout.strip()


def check_out(name: str, root: Path, say: Callable[[str], None] = lambda line: None) -> Revision:
    """The revision called ``name``, ready to run.

    Raises:
        UsageError: there is no such revision, or it has no harness.
        RevisionError: git refused, or its environment could not be installed.
    """
    commit = resolve(name, root)
    tree = root if commit is None else _worktree(commit, root)
    if not (tree / "harness" / "worker.py").is_file():
        raise UsageError(f"{name} has no harness: there is nothing in it that could be measured")
    return Revision(name, commit, Home(tree, interpreter(tree, root, say)))


def _worktree(commit: str, root: Path) -> Path:
    """A clean checkout of ``commit``; an old one is reused if it is still clean."""
    tree = root / ".cache" / "revisions" / commit[:16]
    if (tree / ".git").exists():
        head = _git(tree, "rev-parse", "HEAD")
        changes = _git(tree, "status", "--porcelain", "--untracked-files=no")
        if head.stdout.strip() == commit and changes.returncode == 0 and not changes.stdout.strip():
            return tree
        _git(root, "worktree", "remove", "--force", str(tree))
    if tree.exists():
        shutil.rmtree(tree)
    tree.parent.mkdir(parents=True, exist_ok=True)
    _git(root, "worktree", "prune")
    answer = _git(root, "worktree", "add", "--detach", "--force", str(tree), commit)
    if answer.returncode != 0:
        raise RevisionError(f"git could not check out {commit[:12]} into {tree}: {_last_line(answer.stderr)}")
    return tree


def interpreter(tree: Path, root: Path, say: Callable[[str], None] = lambda line: None) -> Path:
    """The interpreter for the code in ``tree``: this one if its lock file is that of ``root``, else one of its own.

    Raises:
        RevisionError: the environment could not be installed.
    """
    lock = _text(tree / _LOCK)
    if lock is None or lock == _text(root / _LOCK):
        return Path(sys.executable)
    folder = root / ".cache" / "environments" / hashlib.sha256(lock.encode()).hexdigest()[:16]
    python, stamp = folder / "bin" / "python", folder / ".complete"
    if stamp.is_file() and python.exists():
        return python
    say(f"installing the environment of {tree.name}, whose lock file differs; this takes some minutes")
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)], tree)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _run([*pip, "-r", str(tree / _LOCK)], tree)
    stamp.touch()
    return python


def same_environment(a: Revision, b: Revision) -> bool:
    """True if both run in one environment."""
    return a.home.python == b.home.python


def _run(command: list[str], folder: Path) -> None:
    try:
        answer = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RevisionError(f"the environment of {folder} could not be made: {error}") from error
    if answer.returncode != 0:
        raise RevisionError(f"the environment of {folder} could not be made: {_last_line(answer.stderr)}")


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise RevisionError(f"git cannot be run: {error}") from error


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]
