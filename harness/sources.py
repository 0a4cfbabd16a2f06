"""Where a user's checkpoints and data lie: a TOML file that maps them to folders or hub ids.

``catalog/paper.example.toml`` shows and explains the form. Importing this module does not import torch.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import UsageError

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class Checkpoint:
    """A model's checkpoint for one task.

    ``location`` is a folder or a hub id. ``labels`` are the names of its classes in the order of its logits, where its
    own configuration does not tell them; None reads them there.
    """

    location: str
    labels: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Sources:
    """Checkpoints by model and task, and data by task. ``path`` is the file they were read from."""

    checkpoints: Mapping[tuple[str, str], Checkpoint] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    path: Path | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that have a checkpoint, in the file's order."""
        return tuple(dict.fromkeys(model for model, _ in self.checkpoints))

    def checkpoint(self, model: str, task: str | None) -> Checkpoint | None:
        """The model's checkpoint for a task; None where the file names none."""
        return None if task is None else self.checkpoints.get((model, task))


def read(path: Path) -> Sources:
    """The sources in a file. Relative folders are relative to it.

    Raises:
        UsageError: no such file, or it is not of the form; one line that says what to correct.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; --sources names a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    unknown = sorted(set(table) - {"models", "tasks"})
    if unknown:
        raise UsageError(f"{path}: unknown table {unknown[0]!r}; there are [tasks] and [models.NAME]")
    base = path.resolve().parent
    data = {task: _location(path, base, f"tasks.{task}", text) for task, text in _table(path, table, "tasks").items()}
    checkpoints = {
        (model, task): _checkpoint(path, base, f"models.{model}.{task}", value)
        for model in _table(path, table, "models")
        for task, value in _table(path, table["models"], model).items()
    }
    return Sources(checkpoints, data, path)


def _table(path: Path, table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = table.get(name, {})
    if not isinstance(found, dict):
        raise UsageError(f"{path}: {name} must be a table: write [models.{name}] and below it TASK = LOCATION")
    return found


def _checkpoint(path: Path, base: Path, where: str, value: Any) -> Checkpoint:
    if isinstance(value, str):
        return Checkpoint(_location(path, base, where, value))
    labels = value.get("labels") if isinstance(value, dict) else None
    listed = isinstance(labels, list) and bool(labels) and all(isinstance(label, str) for label in labels)
    if not isinstance(value, dict) or set(value) - {"checkpoint", "labels"} or not (labels is None or listed):
        raise UsageError(f'{path}: {where} must be LOCATION or {{ checkpoint = LOCATION, labels = ["NAME", ...] }}')
    location = _location(path, base, where, value.get("checkpoint"))
    return Checkpoint(location, None if labels is None else tuple(labels))


def _location(path: Path, base: Path, where: str, text: Any) -> str:
    """A folder or file as an absolute path, or a hub id as it is."""
    if not isinstance(text, str) or not text:
        raise UsageError(f"{path}: {where} must be a folder or a hub id in quotes")
    local = base / Path(text).expanduser()
    if local.exists():
        return str(local)
    if _HUB_ID.fullmatch(text):
        return text
    raise UsageError(f"{path}: {where}: there is no {local}, and {text!r} is no hub id (owner/name)")
