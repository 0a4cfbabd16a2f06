"""What the sidecar files say of a judged cell's examples: the worst with their text, and flips by FP32's margin.

The arrays are those of :mod:`harness.tasks.notable`. A file that is missing, damaged or from an older version has none,
and the page says so: a picture is never drawn from a part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness import assets
from harness.errors import HarnessError
from harness.records import Accuracy, Cell, Store

#: How many of the kept examples a page shows.
SHOWN = 8


@dataclass(frozen=True, slots=True)
class Example:
    """One example. ``changed``: whether its prediction is another; margins are in logits, None for scored answers."""

    index: int
    text: str
    label: str | None
    fp32: str
    own: str
    changed: bool
    right: bool | None
    fp32_margin: float | None
    own_margin: float | None


@dataclass(frozen=True, slots=True)
class Group:
    """Examples whose FP32 margin lies between ``low`` and ``high``: how many, and how many of them changed."""

    low: float
    high: float
    count: int
    flips: int

    @property
    def share(self) -> float:
        """Changed examples as a fraction."""
        return self.flips / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of the examples of one judged cell. ``most``: the largest share of a group, for the scale."""

    worst: tuple[Example, ...]
    groups: tuple[Group, ...]

    @property
    def most(self) -> float:
        """The largest share of changed examples in a group; never zero."""
        return max((group.share for group in self.groups), default=0.0) or 1.0

    @property
    def flips(self) -> int:
        """Changed examples."""
        return sum(group.flips for group in self.groups)

    @property
    def unsure(self) -> float | None:
        """The share of all flips that lie in the half of the examples that FP32 was less sure of; None without any."""
        half = sum(group.count for group in self.groups) / 2
        seen = flips = 0
        for group in self.groups:
            if seen + group.count > half + 0.5:
                break
            seen, flips = seen + group.count, flips + group.flips
        return flips / self.flips if self.flips else None


def read(store: Store, cell: Cell, accuracy: Accuracy | None) -> Told | None:
    """What the cell's sidecar file holds; None where there is none, or it holds nothing of the kind."""
    if accuracy is None or not accuracy.outputs:
        return None
    try:
        return told(store.outputs(accuracy.outputs), _names(cell.task))
    except HarnessError:
        return None


def _names(task: str | None) -> tuple[str, ...]:
    row = assets.catalog("tasks").get(task or "", {})
    return tuple(str(name) for name in row.get("labels", ()))


def told(arrays: Mapping[str, Any], names: tuple[str, ...] = ()) -> Told | None:
    """What a page shows of the sidecar's arrays; ``names`` of the classes. None where arrays are missing or misfit."""
    if not {"worst", "worst_texts", "worst_fp32"} <= set(arrays):
        return None
    try:
        rows = [
            _example(arrays, names, place, int(index)) for place, index in enumerate(arrays["worst"][:SHOWN].tolist())
        ]
        return Told(tuple(rows), _groups(arrays))
    except (IndexError, KeyError, TypeError, ValueError):
        return None


def _example(arrays: Mapping[str, Any], names: tuple[str, ...], place: int, index: int) -> Example:
    text = str(arrays["worst_texts"][place])
    if "logits" not in arrays:
        fp32, own = str(arrays["worst_fp32"][place]), str(arrays["answers"][index])
        return Example(index, text, None, fp32, own, fp32 != own, None, None, None)
    fp32_logits, logits = arrays["worst_fp32"][place], arrays["logits"][index]
    before, after, label = int(np.argmax(fp32_logits)), int(np.argmax(logits)), int(arrays["labels"][index])
    return Example(
        index,
        text,
        _name(names, label),
        _name(names, before),
        _name(names, after),
        before != after,
        after == label,
        _margin(fp32_logits),
        _margin(logits),
    )


def _name(names: tuple[str, ...], place: int) -> str:
    return names[place] if 0 <= place < len(names) else f"class {place}"


def _margin(logits: Any) -> float:
    first, second = np.sort(np.asarray(logits, dtype=np.float64))[::-1][:2]
    return float(first - second)


def _groups(arrays: Mapping[str, Any]) -> tuple[Group, ...]:
    if not {"margin_edges", "margin_counts", "margin_flips"} <= set(arrays):
        return ()
    edges, counts, flips = (arrays[f"margin_{name}"].tolist() for name in ("edges", "counts", "flips"))
    return tuple(
        Group(float(low), float(high), int(count), int(changed))
        for low, high, count, changed in zip(edges[:-1], edges[1:], counts, flips, strict=True)
    )
