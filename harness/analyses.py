"""Where analyses of a model or a host lie beside the runs: ``<results>/analyses/<kind>-<name>.json``, one file each.

The site reads them. A newer analysis replaces the older one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.errors import StoreError
from harness.tasks.base import safe

FOLDER = "analyses"


def path_of(results: Path, kind: str, name: str) -> Path:
    """The file of an analysis. ``name`` may be a folder or hub id; what no file's name can hold becomes ``_``."""
    return results / FOLDER / f"{kind}-{safe(name)}.json"


def write(results: Path, kind: str, name: str, data: Mapping[str, Any]) -> Path:
    """Write an analysis completely or not at all, and return its path. Infinities and NaN become null.

    Raises:
        StoreError: the folder cannot be written.
    """
    path = path_of(results, kind, name)
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(finite(data), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}; name another folder with --results") from error
    return path


def finite(value: Any) -> Any:
    """``value`` with None where a number is infinite or none, in all its lists and tables."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return value
