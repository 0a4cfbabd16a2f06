"""A newer lock file, judged: `python -m harness.upgrade FOLDER`.

Resolves newer versions into the lock file (`make lock`, pins of the project included), commits that alone, and compares
the commit with the one before it: `harness compare`, each in an environment of its own. If it fails, the packages that
changed are narrowed down to the few that make it fail. FOLDER gets ``upgrade.md`` (the report) and ``upgrade.patch``.

Exits 0 if nothing changed or the upgrade passes, else with the code of the comparison. The branch that is checked out
and its files are not touched: everything is made in a worktree, and its commits hang on no branch.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LOCK, PROJECT = "requirements.lock", "pyproject.toml"
#: Exit codes of a comparison that say something about the candidate. With others nothing is known.
_GOOD, _BAD = {0}, {1, 2}
#: Bound on comparisons while narrowing down: each takes minutes.
MOST_TRIALS = 16


@dataclass(frozen=True)
class Change:
    """A package with its locked version before and after; None where it is not in the file."""

    name: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        return f"{self.name} {self.before or 'none'} -> {self.after or 'none'}"


def changes(before: str, after: str) -> tuple[Change, ...]:
    """What differs between two lock files, by name."""
    old, new = _pins(before), _pins(after)
    return tuple(
        Change(name, old.get(name), new.get(name)) for name in sorted({*old, *new}) if old.get(name) != new.get(name)
    )


def with_changes(lock: str, chosen: Sequence[Change]) -> str:
    """``lock`` with some packages as they are after the change."""
    wanted = {change.name: change.after for change in chosen}
    lines = [
        f"{name}=={wanted.pop(name) or ''}" if (name := line.partition("==")[0]) in wanted else line
        for line in lock.splitlines()
    ]
    kept = [line for line in lines if not line.endswith("==")]
    return "\n".join([*kept, *(f"{name}=={version}" for name, version in wanted.items() if version)]) + "\n"


def with_pins(project: str, lock: str) -> str:
    """``pyproject.toml`` with its exact pins (``"torch==2.13.0"``) at the versions of ``lock``."""
    locked = _pins(lock)

    def pinned(match: re.Match[str]) -> str:
        return f'"{match[1]}=={locked.get(match[1], match[2])}"'

    return re.sub(r'"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)"', pinned, project)


def culprits(
    suspects: Sequence[Change], is_bad: Callable[[Sequence[Change]], bool | None], most: int = MOST_TRIALS
) -> tuple[Change, ...]:
    """The fewest of ``suspects`` found that still fail together, none of which can be left out.

    Delta debugging (A. Zeller, R. Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE Transactions on
    Software Engineering 28, 2002, algorithm ddmin): halves first, then what is left without a part, then finer parts.

    Args:
        suspects: changes that fail together.
        is_bad: whether some of them fail; None where they cannot be tried, as versions that do not fit each other.
        most: trials at most; then what was found so far is returned.
    """
    tried: dict[tuple[Change, ...], bool | None] = {}

    def bad(chosen: tuple[Change, ...]) -> bool:
        if chosen not in tried:
            if len(tried) >= most:
                return False
            tried[chosen] = is_bad(chosen)
        return tried[chosen] is True

    found, parts = tuple(suspects), 2
    while len(found) > 1:
        size = -(-len(found) // parts)
        pieces = [found[start : start + size] for start in range(0, len(found), size)]
        rests = [tuple(one for one in found if one not in piece) for piece in pieces] if len(pieces) > 2 else []
        smaller = next((piece for piece in pieces if bad(piece)), None)
        rest = None if smaller is not None else next((rest for rest in rests if bad(rest)), None)
        if smaller is not None:
            found, parts = smaller, 2
        elif rest is not None:
            found, parts = rest, max(parts - 1, 2)
        elif size == 1:
            break
        else:
            parts = min(len(found), 2 * parts)
    return found


def report(changed: Sequence[Change], code: int, comparison: str, guilty: Sequence[Change]) -> str:
    """The report in Markdown: what changed, what the comparison said, and which packages make it fail."""
    outcome = "passes" if code == 0 else f"fails (exit {code})"
    lines = [f"### Upgrade of {len(changed)} packages: {outcome}", "", *(f"* {change}" for change in changed), ""]
    if guilty:
        lines += ["It fails with these alone:", "", *(f"* **{change}**" for change in guilty), ""]
    return "\n".join([*lines, comparison.strip()]) + "\n"


def _pins(lock: str) -> dict[str, str]:
    pairs = (line.split("==", 1) for line in lock.splitlines() if "==" in line and not line.startswith("#"))
    return {name.strip(): version.strip() for name, version in pairs}


# --- doing it ---------------------------------------------------------------------------------------------------------


class _Project:
    """The repository, a worktree of it in which the upgrade is made, and the comparison."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.root, self._scratch = root, scratch
        self.tree = scratch / "tree"
        _run(["git", "worktree", "add", "--quiet", "--detach", str(self.tree), "HEAD"], root)

    def close(self) -> None:
        _run(["git", "worktree", "remove", "--force", str(self.tree)], self.root)

    def text(self, name: str) -> str:
        return (self.tree / name).read_text(encoding="utf-8")

    def resolve(self) -> None:
        """Newest versions into the worktree's lock file."""
        _run(["make", "lock", "UPGRADE=1", f"PYTHON={sys.executable}"], self.tree)

    def commit(self, lock: str, message: str) -> str:
        """A commit on top of HEAD whose only change is the lock file with the pins that follow from it."""
        _run(["git", "reset", "--quiet", "--hard", "HEAD"], self.tree)
        before = self.text(PROJECT)
        (self.tree / LOCK).write_text(lock, encoding="utf-8")
        (self.tree / PROJECT).write_text(with_pins(before, lock), encoding="utf-8")
        who = ["-c", "user.name=upgrade", "-c", "user.email=upgrade@localhost"]
        _run(["git", *who, "commit", "--quiet", "--all", "--message", message], self.tree)
        made = _run(["git", "rev-parse", "HEAD"], self.tree).strip()
        _run(["git", "checkout", "--quiet", "--detach", "HEAD~1"], self.tree)
        return made

    def patch(self, commit: str) -> str:
        return _run(["git", "format-patch", "--stdout", "-1", commit], self.root)

    def compare(self, commit: str, markdown: Path) -> int:
        command = [sys.executable, "-m", "harness", "compare", f"{commit}~1", commit, "--markdown", str(markdown)]
        return subprocess.run(command, cwd=self.root, stdout=sys.stderr, check=False).returncode


def upgrade(root: Path, folder: Path, make: Callable[[Path, Path], _Project] = _Project) -> int:
    """Make, judge and, if it fails, narrow down an upgrade. Returns the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="harness-upgrade-") as scratch:
        project = make(root, Path(scratch))
        try:
            before = project.text(LOCK)
            project.resolve()
            after = project.text(LOCK)
            changed = changes(before, after)
            if not changed:
                print("nothing to upgrade: the lock file holds the newest versions", file=sys.stderr)
                return 0
            commit = project.commit(after, f"Upgrade {len(changed)} packages of the lock file")
            (folder / "upgrade.patch").write_text(project.patch(commit), encoding="utf-8")
            markdown = Path(scratch) / "compare.md"
            code = project.compare(commit, markdown)
            guilty: tuple[Change, ...] = ()
            if code in _BAD:
                guilty = culprits(changed, lambda chosen: _judged(project, before, chosen, markdown))
            said = markdown.read_text(encoding="utf-8") if markdown.is_file() else ""
            (folder / "upgrade.md").write_text(report(changed, code, said, guilty), encoding="utf-8")
            return code
        finally:
            project.close()


def _judged(project: _Project, before: str, chosen: Sequence[Change], markdown: Path) -> bool | None:
    """Whether some of the changes fail; None where that cannot be told (they cannot be installed together, or run)."""
    commit = project.commit(with_changes(before, chosen), f"Try {', '.join(change.name for change in chosen)}")
    code = project.compare(commit, markdown.with_name("trial.md"))
    return True if code in _BAD else False if code in _GOOD else None


def _run(command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> str:
    answer = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise SystemExit(f"error: {' '.join(command[:3])} failed: {(answer.stderr.strip().splitlines() or ['?'])[-1]}")
    return answer.stdout


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 64
    return upgrade(Path.cwd(), Path(arguments[0]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
