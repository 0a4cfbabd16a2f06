"""Verdicts on a run by the history of its cells: docs/gates.md, "History". Pure, given the history.

What people said (accepted and pinned runs, known changes) becomes positions in each series, ``harness.trends`` judges
the series, and its word becomes verdicts: ``speed`` and ``drift`` of a cell, ``geomean`` of a model and recipe.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from harness import trends
from harness.history import ITERATION_S, History, RunEntry, Series
from harness.known_changes import Applied
from harness.records import Cell
from harness.stats import Array
from harness.trends import Accepted, Trend, TrendRules
from harness.verdicts import Outcome, Verdict, is_gated, option, replay_command

#: In the reason of a verdict whose newest run alone is off its level.
STRAY = "one run alone decides nothing"
#: From so many cells on a geometric mean tells more than a cell.
_LEAST_CELLS = 2


@dataclass(frozen=True)
class Said:
    """What people said about runs: ids of accepted runs, the id of the pinned one, known changes that runs have."""

    accepted: tuple[str, ...] = ()
    pinned: str | None = None
    known: tuple[Applied, ...] = ()


@dataclass(frozen=True)
class _Followed:
    """A cell of the judged run whose history is long enough."""

    cell: Cell
    gated: bool
    series: Series
    trend: Trend


def judge(
    history: History, said: Said | None = None, rules: TrendRules | None = None
) -> tuple[dict[str, list[Verdict]], list[Verdict]]:
    """Verdicts on the newest run of ``history``, which holds the runs of one comparable host up to the judged one.

    Returns:
        Verdicts by cell key, of the cells whose history is long enough; and those on geometric means.
    """
    said, rules = said or Said(), rules or TrendRules()
    if not history.entries or history.entries[-1].disturbed:
        return {}, []
    newest = history.entries[-1]
    cells = [found for place in range(len(newest.cells)) if (found := _followed(history, newest, place, said, rules))]
    groups = list(_groups(cells, history, rules))
    real = trends.real([one.trend for one in cells] + [trend for _, trend in groups], rules)
    of_cells = {
        one.cell.key: list(_cell_verdicts(one, call, rules))
        for one, call in zip(cells, real[: len(cells)], strict=True)
    }
    of_groups = [
        _group_verdict(members, trend, call, newest)
        for (members, trend), call in zip(groups, real[len(cells) :], strict=True)
    ]
    return of_cells, of_groups


def _followed(history: History, newest: RunEntry, place: int, said: Said, rules: TrendRules) -> _Followed | None:
    cell = newest.cells[place]
    series = history.series(cell.key, ITERATION_S)
    trend = trends.judge(series.usable().tolist(), positions(series, said), rules)
    return None if trend is None else _Followed(cell, is_gated(cell, newest.header), series, trend)


def positions(series: Series, said: Said) -> Accepted:
    """What was said, as positions in ``series``: a run that lacks the cell counts as the next one that has it."""
    known = [
        int(np.searchsorted(series.started_at, one.started_at))
        for one in said.known
        if one.change.metric == "speed" and one.change.matches(series.key)
    ]
    places = {run_id: place for place, run_id in enumerate(series.run_ids)}
    accepted = [places[run_id] for run_id in said.accepted if run_id in places]
    pinned = places.get(said.pinned) if said.pinned is not None else None
    if pinned is None and accepted:
        pinned = min(accepted)
    inside = tuple(place for place in known if place < len(series.run_ids))
    return Accepted(tuple(accepted), inside, pinned)


# --- cells ------------------------------------------------------------------------------------------------------------


def _cell_verdicts(one: _Followed, real: bool, rules: TrendRules) -> Iterator[Verdict]:
    trend, key = one.trend, one.cell.key
    outcome = _outcome(trend, real)
    yield Verdict(
        key,
        "speed",
        outcome,
        one.gated,
        value=trend.level / trend.newest,
        baseline=trend.level,
        limit=1.0 / (1.0 + trend.visible),
        reason=_reason(trend, real, one.series, rules),
        command=f"{replay_command(key)} --profile" if outcome == "regression" else None,
        baseline_run=one.series.run_ids[trend.first],
    )
    if trend.drift is not None:
        yield _drift_verdict(one, trend.drift, rules)


def _outcome(trend: Trend, real: bool) -> Outcome:
    if trend.sudden:
        return "regression"
    if trend.change is None or not real:
        return "pass"
    return "regression" if trend.change.size > 0 else "improvement"


def _reason(trend: Trend, real: bool, series: Series, rules: TrendRules) -> str:
    level = f"the level of {trend.runs} runs since {series.run_ids[trend.first]}"
    parts = [f"{100 / (1 + trend.size):.1f} % of the speed at {level}"]
    if trend.change is not None:
        since = series.run_ids[trend.change.first]
        speed = 1.0 / (1.0 + trend.change.size) - 1.0
        parts.append(f"{_faster(speed)} since run {since}" + ("" if real else ", not yet told from chance"))
    elif trend.sudden:
        parts.append(f"so slow that one run decides ({rules.alone:g} times the level)")
    elif trend.strays:
        parts.append(f"{STRAY}: measure again")
    parts.append(f"noise {100 * trend.noise:.1f} %, three runs show a change of {100 * trend.visible:.1f} %")
    return "; ".join(parts)


def _faster(speed: float) -> str:
    return f"{100 * abs(speed):.1f} % {'faster' if speed > 0 else 'slower'}"


def _drift_verdict(one: _Followed, drift: float, rules: TrendRules) -> Verdict:
    value = 1.0 / (1.0 + drift)
    outcome: Outcome = "regression" if drift > 0 else "improvement"
    return Verdict(
        one.cell.key,
        "drift",
        outcome,
        one.gated,
        value=value,
        limit=1.0 / (1.0 + rules.pinned.smallest),
        reason=f"{_faster(value - 1)} than at the pinned release over the newest {rules.pinned.runs} runs, without "
        "steps that were accepted since",
        command=f"{replay_command(one.cell.key)} --profile" if drift > 0 else None,
    )


# --- all cells of a model and recipe ----------------------------------------------------------------------------------


def group_key(cell: Cell) -> str:
    """How a geometric mean is named: ``model/engine/recipe``."""
    return f"{cell.model}/{cell.engine}/{cell.recipe}"


def _groups(cells: Sequence[_Followed], history: History, rules: TrendRules) -> Iterator[tuple[list[_Followed], Trend]]:
    """Members and trend of each group that has several cells; while a cell's own level is new, the group's is too."""
    by_key: dict[str, list[_Followed]] = {}
    for one in cells:
        by_key.setdefault(group_key(one.cell), []).append(one)
    places = {entry.run_id: place for place, entry in enumerate(history.entries)}
    for members in by_key.values():
        if len(members) < _LEAST_CELLS:
            continue
        aligned = [_aligned(one.series, places) for one in members]
        begin = max(places[one.series.run_ids[one.trend.begins]] for one in members)
        trend = trends.judge(trends.geomean([column[begin:] for column in aligned]).tolist(), None, rules)
        if trend is not None:
            yield members, trend


def _aligned(series: Series, places: dict[str, int]) -> Array:
    """(runs,) usable costs, one for each run of the history, NaN where the run lacks the cell."""
    column = np.full(len(places), math.nan)
    column[[places[run_id] for run_id in series.run_ids]] = series.usable()
    return column


def _group_verdict(members: Sequence[_Followed], trend: Trend, real: bool, newest: RunEntry) -> Verdict:
    outcome = _outcome(trend, real)
    slowest = max(members, key=lambda one: one.trend.size)
    sources = option(newest.header.arguments, "--sources")
    gated = any(one.gated for one in members)
    change = "" if trend.change is None else f"; {_faster(1.0 / (1.0 + trend.change.size) - 1.0)} than the level"
    return Verdict(
        group_key(members[0].cell),
        "geomean",
        outcome,
        gated,
        value=trend.level / trend.newest,
        limit=1.0 / (1.0 + trend.visible),
        reason=f"{100 / (1 + trend.size):.1f} % of the speed of {len(members)} cells at their levels{change}; noise "
        f"{100 * trend.noise:.1f} %, three runs show a change of {100 * trend.visible:.1f} %",
        command=f"{replay_command(slowest.cell.key, sources)} --profile" if outcome == "regression" else None,
    )
