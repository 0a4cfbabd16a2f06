"""Changes that are meant: ``known_changes.toml`` at the project's root, as docs/gates.md says ("Known changes").

    changes = known_changes.read(project_root() / known_changes.FILE)
    known_changes.applying(changes, history, descends=known_changes.descendants(project_root()))

The second gives each entry with the first run that has it, and the cells that it is about: what pages annotate.
"""

from __future__ import annotations

import fnmatch
import functools
import re
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.history import History

FILE = "known_changes.toml"
#: What may be known to have changed: what is judged by what was. Accuracy and evidence are judged by what must be.
METRICS = ("speed", "flips_previous")
_FIELDS = ("series", "metric", "commit", "reason", "who")
_COMMIT = re.compile(r"[0-9a-f]{7,40}")

#: Whether the second commit is the first or descends from it.
Descends = Callable[[str, str], bool]


@dataclass(frozen=True)
class KnownChange:
    """One entry: the cells (``*`` matches anything) and the metric, the commit that changed them, why, and who says
    so."""

    series: str
    metric: str
    commit: str
    reason: str
    who: str

    def matches(self, key: str) -> bool:
        """True if the entry is about the cell ``key``."""
        return fnmatch.fnmatchcase(key, self.series.replace("[", "[[]"))


@dataclass(frozen=True)
class Applied:
    """An entry that runs of a host have: ``first_run`` is the first of them, ``keys`` are the cells it is about."""

    change: KnownChange
    host: str
    first_run: str
    started_at: float
    keys: tuple[str, ...]


def read(path: Path) -> tuple[KnownChange, ...]:
    """The entries of a file, in its order; none where there is no file.

    Raises:
        UsageError: it cannot be read or is not of the form; one line that says what to correct.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {' '.join(str(error).split())}") from error
    unknown = sorted(set(table) - {"change"})
    if unknown:
        raise UsageError(f"{path}: unknown table {unknown[0]!r}; each entry begins with [[change]]")
    entries = table.get("change", [])
    if not isinstance(entries, list):
        raise UsageError(f"{path}: each entry begins with [[change]], in two pairs of brackets")
    return tuple(_entry(path, number, entry) for number, entry in enumerate(entries, start=1))


def _entry(path: Path, number: int, entry: Any) -> KnownChange:
    where = f"{path}: change {number}"
    if not isinstance(entry, dict):
        raise UsageError(f"{where} must be a table that begins with [[change]]")
    unknown = sorted(set(entry) - set(_FIELDS))
    if unknown:
        raise UsageError(f"{where}: unknown field {unknown[0]!r}; there are {', '.join(_FIELDS)}")
    found = {"metric": METRICS[0], **entry}
    for name in _FIELDS:
        if not isinstance(found.get(name), str) or not found[name].strip():
            raise UsageError(f"{where}: {name} must be a text that is not empty")
    if found["metric"] not in METRICS:
        raise UsageError(f"{where}: metric {found['metric']!r} cannot be excused; there are {', '.join(METRICS)}")
    if not _COMMIT.fullmatch(found["commit"]):
        raise UsageError(f"{where}: commit {found['commit']!r} must be 7 to 40 hexadecimal digits")
    return KnownChange(**found)


def applying(changes: Sequence[KnownChange], history: History, descends: Descends | None = None) -> tuple[Applied, ...]:
    """The entries that runs of ``history`` have, with the first such run of each host.

    Args:
        descends: whether a run's commit has a change in it; by default only if it is that very commit.
    """
    has = descends or same_commit
    hosts = tuple(dict.fromkeys(entry.header.fingerprint for entry in history.entries))
    found = []
    for change in changes:
        for host in hosts:
            mine = history.of_host(host)
            known = mine.keys()
            keys = tuple(key for key in known if change.matches(key))
            first = next(
                (one for one in mine.entries if one.header.commit and has(change.commit, one.header.commit)), None
            )
            if keys and first is not None:
                found.append(Applied(change, host, first.run_id, first.header.started_at, keys))
    return tuple(found)


def same_commit(commit: str, other: str) -> bool:
    """True if both name one commit; either may be shortened."""
    return other.startswith(commit) or commit.startswith(other)


def descendants(root: Path) -> Descends:
    """Asks git in ``root`` which commits descend from one; where git does not know, only the very commit counts."""

    @functools.cache
    def of(commit: str) -> frozenset[str]:
        command = ["git", "rev-list", f"--ancestry-path={commit}", "--all", f"^{commit}"]
        try:
            asked = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        except OSError:
            return frozenset()
        return frozenset(asked.stdout.split()) if asked.returncode == 0 else frozenset()

    return lambda commit, other: same_commit(commit, other) or other in of(commit)
