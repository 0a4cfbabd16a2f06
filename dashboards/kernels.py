"""The kernels page: which kernel each shape got, how long the others took, and what ran in each cell. Pure.

Reads ``evidence.selection`` of the newest records: a list of objects ``m``, ``n``, ``k``, ``epilogue``, ``out_dtype``,
``kernel`` (the chosen one) and ``times_s`` (seconds by kernel). Whatever has another shape is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dashboards import wording
from dashboards.facts import Facts
from harness.records import slug


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel that was timed. ``length``: percent of the slowest; ``rate``: operations a second; ``behind``: how many
    times the chosen one's time."""

    name: str
    seconds: float
    length: float
    rate: float
    behind: float | None
    chosen: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """One product and what it got; ``cells``: in how many cells the same choice was made with the same times."""

    m: int
    n: int
    k: int
    epilogue: str
    out_dtype: str
    kernel: str
    candidates: tuple[Candidate, ...]
    cells: tuple[str, ...]

    @property
    def remembered(self) -> bool:
        """True where nothing was timed: the choice came from the cache, or there was nothing to choose from."""
        return not self.candidates


@dataclass(frozen=True, slots=True)
class Ran:
    """The kernels of one cell with their calls in a forward pass."""

    facts: Facts
    href: str
    ours: int
    calls: int


@dataclass(frozen=True, slots=True)
class Panel:
    """One ISA."""

    isa: str
    title: str
    choices: tuple[Choice, ...]
    ran: tuple[Ran, ...]


def panels(facts: Iterable[Facts]) -> tuple[Panel, ...]:
    """A panel an ISA, from the newest record of each cell."""
    by_isa: dict[str, list[Facts]] = {}
    for one in facts:
        if one.status == "ok":
            by_isa.setdefault(one.cell.isa, []).append(one)
    made = []
    for isa in sorted(by_isa, key=lambda name: wording.rank(name, wording.ISA_ORDER)):
        members = by_isa[isa]
        ran = tuple(_ran(one) for one in sorted(members, key=lambda one: one.key) if one.evidence.kernels)
        choices = _choices(members)
        if ran or choices:
            made.append(Panel(isa, wording.isa_title(isa), choices, ran))
    return tuple(made)


def _ran(one: Facts) -> Ran:
    kernels = one.evidence.kernels
    ours = sum(calls for name, calls in kernels.items() if name.startswith("int8:"))
    return Ran(one, f"series/{slug(one.key)}.html", ours, sum(kernels.values()))


def _choices(members: Iterable[Facts]) -> tuple[Choice, ...]:
    cells: dict[tuple[Any, ...], list[str]] = {}
    for one in members:
        for item in getattr(one.evidence, "selection", None) or ():
            key = _key(item)
            if key is not None and one.key not in cells.setdefault(key, []):
                cells[key].append(one.key)
    found = [_choice(key, tuple(names)) for key, names in cells.items()]
    return tuple(sorted(found, key=lambda one: (-one.m * one.n * one.k, one.m, one.n, one.k, one.epilogue, one.kernel)))


def _key(item: Any) -> tuple[Any, ...] | None:
    """The fields of a choice, comparable; None for what has another shape."""
    if not isinstance(item, Mapping):
        return None
    try:
        sizes = tuple(int(item[name]) for name in ("m", "n", "k"))
        times = item.get("times_s") or {}
        timed = tuple(sorted((str(name), float(time)) for name, time in times.items() if _usable(time)))
        return (*sizes, str(item.get("epilogue") or ""), str(item.get("out_dtype") or ""), str(item["kernel"]), timed)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _usable(time: Any) -> bool:
    return isinstance(time, int | float) and math.isfinite(time) and time > 0


def _choice(key: tuple[Any, ...], cells: tuple[str, ...]) -> Choice:
    m, n, k, epilogue, out_dtype, kernel, timed = key
    slowest = max((time for _, time in timed), default=1.0)
    own = dict(timed).get(kernel)
    candidates = tuple(
        Candidate(
            name,
            time,
            100 * time / slowest,
            2.0 * m * n * k / time,
            None if own is None else time / own,
            name == kernel,
        )
        for name, time in sorted(timed, key=lambda item: item[1])
    )
    return Choice(m, n, k, epilogue, out_dtype, kernel, candidates, cells)
