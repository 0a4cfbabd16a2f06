"""What the history of a cost says of its newest value: docs/gates.md, "History". Pure: no input or output, no clock.

:func:`judge` follows one series, :func:`geomean` makes one of several, :func:`real` says which alarms of one night to
believe. The gate and the simulation that measures it (``harness.gate_power``) call these same functions.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from harness import changepoints, stats
from harness.changepoints import Change, Followed, Pinned, Watch
from harness.stats import Array


@dataclass(frozen=True)
class TrendRules:
    """The limits. ``false_calls``: the share of an evening's alarms that may be false on average. ``alone``: a single
    run decides if its cost is at least so many times the level."""

    watch: Watch = field(default_factory=Watch)
    pinned: Pinned = field(default_factory=Pinned)
    false_calls: float = 0.05
    alone: float = 1.5


@dataclass(frozen=True)
class Accepted:
    """What people said about a series, as positions of runs: ``runs`` were accepted, ``known`` begin known changes,
    ``pinned`` is the release that drift is measured from (None: the first run)."""

    runs: tuple[int, ...] = ()
    known: tuple[int, ...] = ()
    pinned: int | None = None


@dataclass(frozen=True)
class Trend:
    """What a series says of its newest run. Costs are in the series' unit; changes are fractions of the cost, positive
    where it rose.

    Attributes:
        newest: the newest cost.
        level: the cost that it is held against.
        noise: the series' own standard deviation from run to run, as a fraction.
        runs: how many runs made the level.
        first: position of the first of them.
        begins: position of the run with which the level began, however long ago.
        visible: the smallest change that three runs in a row can show.
        change: the alarm that stands, None if there is none.
        p_value: of that alarm; 1 without one.
        sudden: True if the newest run alone decides.
        strays: True if the newest run alone lies beyond the level, which decides nothing.
        drift: change against the pinned release where that is an alarm.
    """

    newest: float
    level: float
    noise: float
    runs: int
    first: int
    begins: int
    visible: float
    change: Change | None
    p_value: float
    sudden: bool
    strays: bool
    drift: float | None

    @property
    def size(self) -> float:
        """The newest cost against the level, as a fraction."""
        return self.newest / self.level - 1.0


def judge(
    values: Sequence[float | None], said: Accepted | None = None, rules: TrendRules | None = None
) -> Trend | None:
    """What the series ``values`` (a cost a run, oldest first; None or NaN where unusable) says of its last run.

    None if the last run has no usable cost, or fewer than ``rules.watch.least_history`` come before it at its level.
    """
    return sweep(values, said, rules, first=len(values) - 1)[-1] if len(values) else None


def sweep(
    values: Sequence[float | None], said: Accepted | None = None, rules: TrendRules | None = None, first: int = 0
) -> list[Trend | None]:
    """What :func:`judge` said, or would have said, of each run from ``first`` on when it was the last one."""
    rules, said = rules or TrendRules(), said or Accepted()
    costs = np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    costs[~(np.isfinite(costs) & (np.nan_to_num(costs) > 0))] = math.nan
    followed = changepoints.follow(costs.tolist(), rules.watch, said.runs, said.known)
    return [_trend(costs[: now + 1], followed, said, rules) for now in range(first, len(costs))]


def _trend(costs: Array, followed: Followed, said: Accepted, rules: TrendRules) -> Trend | None:
    """The word on the last of ``costs``; ``followed`` may know more, of which only what was known by then is used."""
    now = len(costs) - 1
    if math.isnan(costs[now]):
        return None
    change = followed.open_at(now)
    change = None if change is None else dataclasses.replace(change, ended=None)
    before = _before(costs, followed, change)
    if len(before) < rules.watch.least_history:
        return None
    level, sigma, unit = changepoints.level_of(np.log(costs[before]), rules.watch.history)
    away = math.log(costs[now]) - level
    threshold = max(rules.watch.windows[0].sigmas * unit, math.log1p(rules.watch.smallest))
    return Trend(
        newest=float(costs[now]),
        level=math.exp(level),
        noise=sigma,
        runs=min(len(before), rules.watch.history),
        first=int(before[-rules.watch.history :][0]),
        begins=int(before[0]),
        visible=math.expm1(threshold),
        change=change,
        p_value=1.0 if change is None else _p_value(costs[change.first :], level, unit, rules),
        sudden=away >= max(math.log(rules.alone), threshold),
        strays=change is None and abs(away) > threshold,
        drift=None if change is not None else _drift(costs, followed, said, rules),
    )


def _p_value(since: Array, level: float, unit: float, rules: TrendRules) -> float:
    return changepoints.surprise(np.log(since[~np.isnan(since)]) - level, unit, rules.watch)


def _before(costs: Array, followed: Followed, change: Change | None) -> npt.NDArray[np.int64]:
    """Positions of the usable runs that make the level which the last run is held against."""
    now = len(costs) - 1
    start = max((one.first for one in followed.starts if one.since <= now), default=0)
    end = now if change is None else change.first
    usable = np.zeros(len(costs), dtype=bool)
    usable[start:end] = ~np.isnan(costs[start:end])
    for past in followed.changes:  # runs of an alarm that went away belong to no level
        if start < past.first and past.ended is not None and past.ended <= end:
            usable[past.first : past.ended - changepoints.BACK + 1] = False
    return np.flatnonzero(usable)


def _drift(costs: Array, followed: Followed, said: Accepted, rules: TrendRules) -> float | None:
    """The newest runs against the pinned ones, without the steps between them that were accepted, known, or kept."""
    span, now = rules.pinned.runs, len(costs) - 1
    starts = [one.first for one in followed.starts if one.since <= now]
    segments = [_usable(costs, left, right) for left, right in itertools.pairwise([*starts, len(costs)])]
    if not segments:
        return None
    pinned = 0 if said.pinned is None else said.pinned
    home = max((place for place, left in enumerate(starts) if left <= pinned), default=0)
    own = segments[home]
    upto = max(int(np.searchsorted(own, pinned, side="right")), min(span, len(own)))
    reference = costs[own[max(upto - span, 0) : upto]]
    newest = own[upto:] if home == len(segments) - 1 else segments[-1]
    steps = [
        (costs[before[-span:]].tolist(), costs[after[:span]].tolist())
        for before, after in itertools.pairwise(segments[home:])
    ]
    return changepoints.drift(costs[newest[-span:]].tolist(), reference.tolist(), rules.pinned, steps)


def _usable(costs: Array, left: int, right: int) -> npt.NDArray[np.int64]:
    return left + np.flatnonzero(~np.isnan(costs[left:right]))


def geomean(series: Sequence[Array]) -> Array:
    """(runs,) geometric mean of several cells' costs (runs,), each relative to its own median; NaN where fewer than
    four fifths of the cells that ever were usable are.

    Relative, so that a cell that is missing in one night moves nothing.
    """
    logs = np.stack([np.log(np.where(np.nan_to_num(one) > 0, one, math.nan)) for one in series])
    present = np.isfinite(logs)
    alive = present.any(axis=1)
    logs, present = logs[alive], present[alive]
    if not len(logs):
        return np.full(len(series[0]), math.nan)
    centred = np.where(present, logs - np.nanmedian(logs, axis=1, keepdims=True), 0.0)
    count = present.sum(axis=0)
    means: Array = np.exp(centred.sum(axis=0) / np.maximum(count, 1))
    return np.where(count >= 0.8 * len(logs), means, math.nan)


def real(trends: Sequence[Trend], rules: TrendRules | None = None) -> list[bool]:
    """Which of one night's trends are alarms to believe."""
    called = believed([trend.p_value for trend in trends], rules)
    return [trend.change is not None and call for trend, call in zip(trends, called, strict=True)]


def believed(p_values: Sequence[float], rules: TrendRules | None = None) -> list[bool]:
    """Which of one night's p-values are called, by Benjamini and Hochberg's rule over all of them."""
    rules = rules or TrendRules()
    adjusted = stats.benjamini_hochberg(np.array(p_values, dtype=np.float64))
    return [bool(value <= rules.false_calls) for value in adjusted]
