"""Changes in the history of one number: fresh steps, slow drift, and the levels that a series has had. Pure.

Three questions, three answers (docs/gates.md, "History"):

* :func:`watch` asks after each run whether the newest runs have left the level before them, and stays alarmed until
  they return or the change is accepted. It must decide on three runs, so it counts how many of them lie beyond a
  threshold rather than testing means: a wild night, however wild, counts once.
* :func:`drift` compares the newest month with a pinned level, which sees what moves too slowly to be a step.
* :func:`levels` fits the whole history, for annotation and for choosing where a baseline starts. That is asv's step
  detection (L1 Potts functional; F. Friedrich et al., "Complexity penalized M-estimation", J. Comput. Graph. Stat. 17,
  2008): robust to outliers, compiled, and a dependency already. Apache Otava (E-divisive with Student's test) was
  weighed: it brings clients for BigQuery, PostgreSQL and Slack and pins numpy to one release; MongoDB's library has had
  no release since 2024; ruptures wants the number of changes or a penalty chosen by hand.

Values are positive costs (seconds, bytes: lower is better). Work is done on logarithms, so sizes are relative changes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

from harness.stats import Array, median, ragged_median, robust_sigma

#: Variance of a median over that of a mean on normal noise: pi / 2.
_MEDIAN_EXCESS = math.pi / 2
#: So many runs in a row near the old level end an alarm: as many as the shortest window needs to begin one.
BACK = 3


@dataclass(frozen=True)
class Window:
    """One way to be alarmed: of the newest ``runs``, at least ``beyond`` lie more than ``sigmas`` from the level."""

    runs: int
    beyond: int
    sigmas: float


@dataclass(frozen=True)
class Watch:
    """The rule of :func:`watch`.

    ``windows`` are tried after each run: the short ones see large steps at once, the long one small steps later.
    ``history`` is how many runs before the window make the level and its noise, ``least_history`` how many must exist.
    Changes below ``smallest`` (a fraction) are never alarmed, however quiet a series is. A gain that has lasted
    ``keep`` runs after it was found becomes the level.
    """

    windows: tuple[Window, ...] = (Window(3, 3, 3.25), Window(5, 4, 2.75), Window(10, 8, 2.0))
    history: int = 60
    least_history: int = 10
    smallest: float = 0.01
    keep: int = 10


@dataclass(frozen=True)
class Pinned:
    """The rule of :func:`drift`: the median of the newest ``runs`` against a pinned level.

    Alarmed beyond ``smallest`` (a fraction) and ``sigmas`` standard errors of the difference of both medians.
    """

    runs: int = 28
    smallest: float = 0.012
    sigmas: float = 4.0


@dataclass(frozen=True)
class Change:
    """A step that :func:`watch` was alarmed by. Positions count runs of the series, missing ones included.

    ``first`` is the first run at the new level, as far as the window tells; ``found`` the run after which the alarm
    began; ``ended`` the run after which it ended because the level came back or the change was accepted, None while it
    lasts. ``size`` is the relative change of the cost: 0.05 is 5 % slower.
    """

    first: int
    found: int
    size: float
    ended: int | None = None


@dataclass(frozen=True)
class Level:
    """Runs ``first`` to ``last`` (inclusive) of a series lie around ``value``. ``confirmed`` is False for a last level
    of too few runs to tell a step from a few wild nights."""

    first: int
    last: int
    value: float
    confirmed: bool


@dataclass(frozen=True)
class Start:
    """A level begins at run ``first``; that it does is known from run ``since`` on."""

    first: int
    since: int


@dataclass(frozen=True)
class Followed:
    """What :func:`follow` found: ``changes`` are alarms in order, ``starts`` say where levels begin."""

    changes: tuple[Change, ...]
    starts: tuple[Start, ...]

    def open_at(self, position: int) -> Change | None:
        """The alarm that stands after run ``position``, None if there is none."""
        for change in reversed(self.changes):
            if change.found <= position and (change.ended is None or position < change.ended):
                return change
        return None


def watch(
    values: Sequence[float | None],
    rule: Watch | None = None,
    accepted: Iterable[int] = (),
    known: Iterable[int] = (),
) -> list[Change]:
    """Every alarm that the series gave, in order; the last one is the current one if its ``ended`` is None.

    The level is that of the runs before the window, back to where it begins. While an alarm lasts the level stays what
    it was, so that a slowdown is not taken for normal merely because it went on.

    Args:
        values: a cost a run, oldest first; None, NaN and what is not positive count as missing.
        rule: when to be alarmed.
        accepted: positions of runs that were accepted. Such a run begins a level if it lies within a change: among the
            runs that made the alarm, or later while it stands. Where nothing has changed it means nothing.
        known: positions from which a change is known: a level begins there in any case.
    """
    return list(follow(values, rule, accepted, known).changes)


def follow(
    values: Sequence[float | None],
    rule: Watch | None = None,
    accepted: Iterable[int] = (),
    known: Iterable[int] = (),
) -> Followed:
    """As :func:`watch`, with the positions where levels begin."""
    rule = rule or Watch()
    logs, places = _usable(values)
    if not len(logs):
        return Followed((), ())
    bounds = sorted({0, *(int(np.searchsorted(places, place)) for place in known)} - {len(places)})
    marks = [int(np.searchsorted(places, place)) for place in sorted(accepted)]
    found: list[Change] = []
    starts: list[Start] = []
    for start, end in zip(bounds, [*bounds[1:], len(logs)], strict=True):
        known_at = int(places[end]) if end < len(logs) else None
        inside = [mark for mark in marks if start < mark < end]
        for change, level_from in _watch_segment(logs, places, start, end, rule, inside):
            if level_from is not None:
                starts.append(level_from)
            if change is not None:
                found.append(dataclasses.replace(change, ended=known_at) if change.ended is None else change)
    return Followed(tuple(found), tuple(starts))


def _usable(values: Sequence[float | None]) -> tuple[Array, npt.NDArray[np.int64]]:
    """Logarithms of the values that can be used, and their positions."""
    costs = np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    places = np.flatnonzero(np.isfinite(costs) & (np.nan_to_num(costs) > 0))
    return np.log(costs[places]), places


def _watch_segment(
    logs: Array, places: npt.NDArray[np.int64], start: int, end: int, rule: Watch, accepted: Sequence[int]
) -> Iterator[tuple[Change | None, Start | None]]:
    """Changes of runs ``start`` to ``end`` and beginnings of levels, each with None for the other."""
    if start < end:
        yield None, Start(int(places[start]), int(places[start]))
    kept = np.arange(start, end)  # runs that belong to the level or have yet to be looked at
    since = 0
    while (hit := _first_alarm(logs[kept], since, rule)) is not None:
        now, runs, shift = hit
        own = logs[kept]
        first = now - runs + 1
        back = _return_to_level(own, now, runs, shift)
        level = _new_level(kept, first, now, shift, back, rule, accepted)
        alarm = Change(int(places[kept[first]]), int(places[kept[now]]), math.expm1(shift))
        if level is not None:
            if level.since > kept[now]:
                yield dataclasses.replace(alarm, ended=int(places[level.since])), None
            yield None, Start(int(places[level.first]), int(places[level.since]))
            kept, since = np.arange(level.first, end), int(level.since - level.first)
        elif back is not None:
            yield dataclasses.replace(alarm, ended=int(places[kept[back]])), None
            # What was measured during the alarm is no part of the level that the series came back to.
            kept, since = np.r_[kept[:first], kept[back - BACK + 1 :]], first + BACK
        else:
            yield alarm, None
            return


def _new_level(
    kept: npt.NDArray[np.int64],
    first: int,
    now: int,
    shift: float,
    back: int | None,
    rule: Watch,
    accepted: Sequence[int],
) -> Start | None:
    """Where a change becomes the level because it was accepted, or because it is a gain that has lasted; None if it
    does not. Positions count usable runs."""
    until = kept[back] if back is not None else kept[-1] + 1
    mark = next((mark for mark in accepted if kept[first] <= mark < until), None)
    lasted = now + rule.keep if shift < 0 else len(kept)
    kept_at = int(kept[lasted]) if lasted < len(kept) and kept[lasted] < until else None
    if mark is not None and (kept_at is None or mark <= kept_at):
        return Start(mark, max(mark, int(kept[now])))
    return None if kept_at is None else Start(int(kept[first]), kept_at)


def _first_alarm(logs: Array, since: int, rule: Watch) -> tuple[int, int, float] | None:
    """The first alarm at or after run ``since``: its run, the runs of its window, and the log shift."""
    level, unit = _levels_before(logs, rule)
    shifts = np.stack([_shifts(logs, level, unit, window, rule) for window in rule.windows])
    hits = np.flatnonzero(shifts.any(axis=0) & (np.arange(len(logs)) >= since))
    if not len(hits):
        return None
    now = int(hits[0])
    which = int(np.argmax(np.abs(shifts[:, now])))
    return now, rule.windows[which].runs, float(shifts[which, now])


def _return_to_level(logs: Array, found: int, runs: int, shift: float) -> int | None:
    """The run after which a few in a row lie nearer to the old level than to the new one; None if there is none."""
    middle = float(np.median(logs[found - runs + 1 : found + 1])) - shift / 2
    back = np.sign(shift) * (logs - middle) < 0
    for now in range(found + BACK, len(logs)):
        if back[now - BACK + 1 : now + 1].all():
            return now
    return None


def _levels_before(logs: Array, rule: Watch) -> tuple[Array, Array]:
    """(runs + 1,) level of up to ``rule.history`` runs before each run and the unit in which windows count; NaN where
    fewer than ``rule.least_history`` come before."""
    count = len(logs) + 1
    level, unit = np.full(count, math.nan), np.full(count, math.nan)
    splits = np.arange(rule.least_history, min(count, rule.history))
    if len(splits):
        before = np.where(np.arange(rule.history) < splits[:, None], np.resize(logs, rule.history), math.nan)
        level[splits] = ragged_median(before)
        unit[splits] = robust_sigma(before, ragged_median) * np.sqrt(1 + _MEDIAN_EXCESS / splits)
    if len(logs) >= rule.history:
        views = np.lib.stride_tricks.sliding_window_view(logs, rule.history)
        level[rule.history :] = median(views)
        unit[rule.history :] = robust_sigma(views) * math.sqrt(1 + _MEDIAN_EXCESS / rule.history)
    return level, unit


def _shifts(logs: Array, level: Array, unit: Array, window: Window, rule: Watch) -> Array:
    """(runs,) log shift of the newest runs from the level before them where that is an alarm, else 0."""
    shifts = np.zeros(len(logs))
    if len(logs) < window.runs:
        return shifts
    newest = np.lib.stride_tricks.sliding_window_view(logs, window.runs)
    splits = slice(0, len(newest))  # a window that begins at run k is held against the level before run k
    away = newest - level[splits, None]
    threshold = np.maximum(window.sigmas * unit[splits], math.log1p(rule.smallest))[:, None]
    alarmed = np.maximum((away > threshold).sum(axis=1), (away < -threshold).sum(axis=1)) >= window.beyond
    shifts[window.runs - 1 :] = np.where(alarmed, median(away), 0.0)
    return shifts


def level_of(logs: Array, history: int) -> tuple[float, float, float]:
    """Level of the last ``history`` of some log costs, their noise, and the unit in which windows count: the noise with
    what is unsure about the level."""
    before = logs[-history:]
    sigma = float(robust_sigma(before))
    return float(median(before)), sigma, sigma * math.sqrt(1 + _MEDIAN_EXCESS / len(before))


#: The noise that p-values assume: Student's t with three degrees of freedom, and a share of wild nights.
_TAIL_FREEDOM, _WILD_SHARE = 3, 0.02
#: A robust standard deviation of that distribution over its scale: 1.4826 times its median absolute deviation.
_TAIL_SIGMA = 1.4826 * 0.7649


def surprise(away: Array, unit: float, rule: Watch | None = None) -> float:
    """p-value of runs that lie ``away`` (n,) from their level, in logs: how likely it is that without any change so
    many of the newest 3, 5, 10 or n lie beyond their thresholds on the side of the majority.

    Each run is beyond a threshold with the probability of a heavy tail plus that of a wild night, independently; the
    number of looks multiplies the smallest of the tails (Bonferroni).
    """
    rule = rule or Watch()
    if unit <= 0 or not len(away):
        return 0.0 if len(away) and np.median(away) != 0 else 1.0
    side = away if np.median(away) >= 0 else -away
    looks = [(window.runs, window.sigmas) for window in rule.windows if window.runs <= len(side)]
    looks.append((len(side), min(window.sigmas for window in rule.windows)))
    tails = []
    for runs, sigmas in looks:
        one = float(special.stdtr(_TAIL_FREEDOM, -sigmas * _TAIL_SIGMA)) + _WILD_SHARE
        beyond = int((side[-runs:] > max(sigmas * unit, math.log1p(rule.smallest))).sum())
        tails.append(float(special.bdtrc(beyond - 1, runs, one)) if beyond else 1.0)
    return min(1.0, len(looks) * min(tails))


def drift(
    values: Sequence[float | None],
    pinned: Sequence[float | None],
    rule: Pinned | None = None,
    steps: Sequence[tuple[Sequence[float | None], Sequence[float | None]]] = (),
) -> float | None:
    """Relative change of the newest runs of a series against those of a pinned release, where it is an alarm.

    Args:
        values: a cost a run, oldest first, since the last step that was accepted.
        pinned: costs of the same cell in the runs of the pinned release.
        steps: of each step accepted since then, the costs next to it before and after. The steps are no part of the
            change; what is unsure about their sizes is part of its error.

    Returns:
        The change (0.015 is 1.5 % slower), or None: no alarm, or too few runs on either side (fewer than ten).
    """
    rule = rule or Pinned()
    newest, reference = _usable(values)[0][-rule.runs :], _usable(pinned)[0]
    if min(len(newest), len(reference)) < 10:
        return None
    sides = [(_usable(before)[0], _usable(after)[0]) for before, after in steps]
    if any(not len(before) or not len(after) for before, after in sides):
        return None
    shift = float(median(newest) - median(reference))
    shift -= sum(float(median(after) - median(before)) for before, after in sides)
    sigma = max(float(robust_sigma(newest)), float(robust_sigma(reference)))
    shares = 1 / len(newest) + 1 / len(reference) + sum(1 / len(one) for side in sides for one in side)
    error = sigma * math.sqrt(_MEDIAN_EXCESS * shares)
    return math.expm1(shift) if abs(shift) > max(rule.sigmas * error, math.log1p(rule.smallest)) else None


def levels(values: Sequence[float | None], confirm: int = 3) -> list[Level]:
    """The levels that a series has had, oldest first.

    A level between two others that holds fewer than ``confirm`` runs is a wild night rather than a level: its runs are
    left out and the rest fitted again. A last level of so few may be the start of one, and is not confirmed.
    """
    logs, places = _usable(values)
    while len(logs):
        bounds = _fit(logs)
        wild = [(left, right) for left, right, _ in bounds[:-1] if right - left < confirm]
        if not wild:
            return [
                Level(int(places[left]), int(places[right - 1]), math.exp(value), right - left >= confirm)
                for left, right, value in bounds
            ]
        keep = np.ones(len(logs), dtype=bool)
        for left, right in wild:
            keep[left:right] = False
        logs, places = logs[keep], places[keep]
    return []


def _fit(logs: Array) -> list[tuple[int, int, float]]:
    """asv's piecewise constant fit, as (first, end, value)."""
    from asv.step_detect import detect_steps  # not above: asv's packages take longer to load than all of this module

    return [(left, right, value) for left, right, value, *_ in detect_steps([float(log) for log in logs])]
