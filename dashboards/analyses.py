"""Analyses beside the runs of a store: files ``<results>/analyses/<kind>-*.json``, each written by a verb of its own.

What the files hold is defined by who writes them (:mod:`harness.roofline_report`, :mod:`harness.outlier_report`, ...).
They may come from another version or be damaged; the pages take what fits and say what does not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.records import Store


@dataclass(frozen=True, slots=True)
class Analysis:
    """One file: its name without the folder, and its content."""

    name: str
    data: Mapping[str, Any]


def read(store: Store, kind: str) -> tuple[tuple[Analysis, ...], tuple[str, ...]]:
    """The store's analyses of a kind, by name, and why others could not be read."""
    found, problems = [], []
    folder = store.root / "analyses"
    for path in sorted(folder.glob(f"{kind}-*.json")) if folder.is_dir() else ():
        try:
            data = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
            problems.append(f"analyses/{path.name} cannot be read: {reason}; make it again")
            continue
        if isinstance(data, dict):
            found.append(Analysis(path.name, data))
        else:
            problems.append(f"analyses/{path.name} holds no object; make it again")
    return tuple(found), tuple(problems)


def number(data: Any, *path: str | int) -> float | None:
    """The finite number at a path into nested objects and lists; None where there is none."""
    value = item(data, *path)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def text(data: Any, *path: str | int) -> str:
    """The text at a path; empty where there is none."""
    value = item(data, *path)
    return value if isinstance(value, str) else "" if value is None else str(value)


def objects(data: Any, *path: str | int) -> list[Mapping[str, Any]]:
    """The objects of the list at a path; what is no object is left out."""
    value = item(data, *path)
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def item(data: Any, *path: str | int) -> Any:
    """What lies at a path, or None."""
    for step in path:
        if isinstance(data, Mapping) or (
            isinstance(data, Sequence) and not isinstance(data, str) and isinstance(step, int) and step < len(data)
        ):
            data = data.get(step) if isinstance(data, Mapping) else data[step]  # type: ignore[index]
        else:
            return None
    return data
