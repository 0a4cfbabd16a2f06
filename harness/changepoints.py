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

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.stats import Array, robust_sigma

#: Variance of a median over that of a mean on normal noise: pi / 2.
_MEDIAN_EXCESS = math.pi / 2
#: So many runs in a row near the old level end an alarm: as many as the shortest window needs to begin one.
_BACK = 3


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
    Changes below ``smallest`` (a fraction) are never alarmed, however quiet a series is.
    """

    windows: tuple[Window, ...] = (Window(3, 3, 3.25), Window(5, 4, 2.75), Window(10, 8, 2.0))
    history: int = 60
    least_history: int = 10
    smallest: float = 0.01


@dataclass(frozen=True)
class Pinned:
    """The rule of :func:`drift`: the median of the newest ``runs`` against a pinned level.

    Alarmed beyond ``smallest`` (a fraction) and ``sigmas`` standard errors of the difference of both medians.
    """

    runs: int = 28
    smallest: float = 0.013
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


def watch(values: Sequence[float | None], rule: Watch | None = None, accepted: Iterable[int] = ()) -> list[Change]:
    """Every alarm that the series gave, in order; the last one is the current one if its ``ended`` is None.

    The level is that of the runs before the window, back to the last accepted change. While an alarm lasts the level
    stays what it was, so that a slowdown is not taken for normal merely because it went on.

    Args:
        values: a cost a run, oldest first; None, NaN and what is not positive count as missing.
        rule: when to be alarmed.
        accepted: positions from which a new level is accepted: nothing before them is looked at from there on.
    """
    rule = rule or Watch()
    logs, places = _usable(values)
    starts = sorted({0, *(int(np.searchsorted(places, place)) for place in accepted)})
    found: list[Change] = []
    for start, end in zip(starts, [*starts[1:], len(logs)], strict=True):
        accepted_at = int(places[end]) if end < len(logs) else None
        found += _watch_segment(logs[start:end], places[start:end], rule, accepted_at)
    return found


def _usable(values: Sequence[float | None]) -> tuple[Array, npt.NDArray[np.int64]]:
    """Logarithms of the values that can be used, and their positions."""
    costs = np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    places = np.flatnonzero(np.isfinite(costs) & (np.nan_to_num(costs) > 0))
    return np.log(costs[places]), places


def _watch_segment(logs: Array, places: npt.NDArray[np.int64], rule: Watch, accepted_at: int | None) -> list[Change]:
    found: list[Change] = []
    since = 0
    while True:
        hit = _first_alarm(logs, since, rule)
        if hit is None:
            return found
        now, runs, shift = hit
        first, ended = now - runs + 1, _return_to_level(logs, now, runs, shift)
        last = accepted_at if ended is None else int(places[ended])
        found.append(Change(int(places[first]), int(places[now]), math.expm1(shift), last))
        if ended is None:
            return found
        # What was measured during the alarm is no part of the level that the series came back to.
        keep = np.r_[:first, ended - _BACK + 1 : len(logs)]
        logs, places, since = logs[keep], places[keep], first + _BACK


def _first_alarm(logs: Array, since: int, rule: Watch) -> tuple[int, int, float] | None:
    """The first alarm at or after run ``since``: its run, the runs of its window, and the log shift."""
    shifts = np.stack([_shifts(logs, window, rule) for window in rule.windows])
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
    for now in range(found + _BACK, len(logs)):
        if back[now - _BACK + 1 : now + 1].all():
            return now
    return None


def _shifts(logs: Array, window: Window, rule: Watch) -> Array:
    """(runs,) log shift of the newest runs from the level before them where that is an alarm, else 0."""
    shifts = np.zeros(len(logs))
    for now in range(rule.least_history + window.runs - 1, min(len(logs), rule.history + window.runs - 1)):
        split = now - window.runs + 1
        shifts[now] = _alarm(logs[None, :split], logs[None, split : now + 1], window, rule)[0]
    whole = rule.history + window.runs
    if len(logs) >= whole:
        views = np.lib.stride_tricks.sliding_window_view(logs, whole)
        shifts[whole - 1 :] = _alarm(views[:, : rule.history], views[:, rule.history :], window, rule)
    return shifts


def _alarm(before: Array, newest: Array, window: Window, rule: Watch) -> Array:
    """(k,) log shift of ``newest`` (k, runs) from the level of ``before`` (k, history) where it is an alarm, else 0."""
    level = np.median(before, axis=1, keepdims=True)
    uncertainty = math.sqrt(1 + _MEDIAN_EXCESS / before.shape[1])
    threshold = np.maximum(window.sigmas * uncertainty * robust_sigma(before), math.log1p(rule.smallest))[:, None]
    away = newest - level
    alarmed = np.maximum((away > threshold).sum(axis=1), (away < -threshold).sum(axis=1)) >= window.beyond
    shift: Array = np.where(alarmed, np.median(away, axis=1), 0.0)
    return shift


def drift(values: Sequence[float | None], pinned: Sequence[float | None], rule: Pinned | None = None) -> float | None:
    """Relative change of the newest runs of a series against those of a pinned release, where it is an alarm.

    Args:
        values: a cost a run, oldest first, without the steps that were accepted since the pinned release.
        pinned: costs of the same cell in the runs of the pinned release.

    Returns:
        The change (0.015 is 1.5 % slower), or None: no alarm, or too few runs on either side (fewer than ten).
    """
    rule = rule or Pinned()
    newest, reference = _usable(values)[0][-rule.runs :], _usable(pinned)[0]
    if min(len(newest), len(reference)) < 10:
        return None
    shift = float(np.median(newest) - np.median(reference))
    sigma = max(float(robust_sigma(newest)), float(robust_sigma(reference)))
    error = sigma * math.sqrt(_MEDIAN_EXCESS * (1 / len(newest) + 1 / len(reference)))
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
