"""The outlier page: how large hidden features get, before and after smoothing, and what zeroing outliers does. Pure.

Reads what ``harness outliers`` writes (:mod:`harness.outlier_report`): the outlier features with their effects and,
where it is there, ``smoothing``: an object a group of linears with ``input`` (its name), ``layer`` (from 0), ``alpha``
(the chosen strength, null where none is used), ``before`` and ``after`` (the largest magnitudes of the features that
are shown), and beside it ``dimensions``: which features these are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dashboards import wording
from dashboards.analyses import Analysis, item, number, objects, text

#: Steps of the heat map's ramp.
STEPS = 6


@dataclass(frozen=True, slots=True)
class Feature:
    """One outlier feature, its values on a scale from 0 to 100 in percent of the picture."""

    dimension: str
    layers: str
    layer_share: float | None
    position_share: float | None
    per_sequence: float | None
    quartiles: str
    low: float | None
    high: float | None
    one_sided: bool | None
    bar: tuple[float, float, float] | None


@dataclass(frozen=True, slots=True)
class Effect:
    """What zeroing does; ``mass`` also as a bar's length in percent."""

    zeroed: str
    mass: float | None
    value: float | None
    flips: float | None
    sqnr_db: float | None


@dataclass(frozen=True, slots=True)
class HeatRow:
    """One input of a group of linears: level 0 to STEPS of each feature, before and after, with the magnitudes."""

    name: str
    alpha: float | None
    before: tuple[tuple[int, str], ...]
    after: tuple[tuple[int, str], ...]
    largest_before: float | None
    largest_after: float | None


@dataclass(frozen=True, slots=True)
class Heat:
    """The heat map of a model: ``limits`` are the magnitudes at which a level begins."""

    dimensions: tuple[str, ...]
    rows: tuple[HeatRow, ...]
    limits: tuple[str, ...]
    alphas: str


@dataclass(frozen=True, slots=True)
class Report:
    """One analysis."""

    model: str
    task: str
    metric: str
    summary: str
    features: tuple[Feature, ...]
    effects: tuple[Effect, ...]
    heat: Heat | None


def reports(analyses: Iterable[Analysis]) -> tuple[Report, ...]:
    """Every analysis, by model."""
    return tuple(sorted((_report(one) for one in analyses), key=lambda one: one.model))


def _report(one: Analysis) -> Report:
    data = one.data
    found = objects(data, "analysis", "features")
    reach = max((abs(number(f, end) or 0.0) for f in found for end in ("low", "high")), default=0.0)
    effects = [Effect("nothing", number(data, "attention_mass"), number(data, "value"), None, None)]
    effects += [
        Effect(
            _zeroed(effect),
            number(effect, "attention_mass"),
            number(effect, "value"),
            number(effect, "flips"),
            number(effect, "sqnr_db"),
        )
        for effect in objects(data, "effects")
    ]
    return Report(
        text(data, "model") or one.name,
        text(data, "task"),
        text(data, "metric"),
        _summary(data),
        tuple(_feature(feature, reach) for feature in found),
        tuple(effects) if len(effects) > 1 else (),
        _heat(data),
    )


def _zeroed(effect: Mapping[str, Any]) -> str:
    dimensions = item(effect, "dimensions")
    count = len(dimensions) if isinstance(dimensions, list) else None
    words = text(effect, "zeroed")
    return words if count is None else f"{count} {words if count != 1 else words.removesuffix('s')}"


def _summary(data: Mapping[str, Any]) -> str:
    count = len(objects(data, "analysis", "features"))

    def shown(name: str) -> str:
        return wording.count(number(data, "analysis", name))

    return (
        f"{count or 'No'} outlier feature{'' if count == 1 else 's'} of {shown('hidden_size')}: a magnitude of at "
        f"least {shown('magnitude')} in {wording.percent(number(data, 'analysis', 'min_layer_share'), 0)} of "
        f"{shown('layers')} layers and in {wording.percent(number(data, 'analysis', 'min_position_share'), 0)} of "
        f"positions. {shown('reached')} features reach it anywhere; the largest magnitude of any other is "
        f"{shown('largest_other')}. Looked at {shown('sequences')} sequences, {shown('tokens')} tokens."
    )


def _feature(one: Mapping[str, Any], reach: float) -> Feature:
    low, high = number(one, "low"), number(one, "high")
    quartiles = [number(one, "quartiles", place) for place in range(3)]
    bar = None
    if low is not None and high is not None and reach > 0:
        start, end = (50 + 50 * value / reach for value in (min(low, 0.0), max(high, 0.0)))
        bar = (start, end - start, 50.0)
    side = item(one, "one_sided")
    return Feature(
        wording.count(number(one, "dimension")),
        wording.count(number(one, "layers")),
        number(one, "layer_share"),
        number(one, "position_share"),
        number(one, "values_per_sequence"),
        ", ".join(wording.significant(value) for value in quartiles),
        low,
        high,
        side if isinstance(side, bool) else None,
        bar,
    )


def _heat(data: Mapping[str, Any]) -> Heat | None:
    """The heat map; None where the analysis has none."""
    groups = objects(data, "smoothing")
    dimensions = item(data, "dimensions")
    if not groups or not isinstance(dimensions, list):
        return None
    everything = [value for one in groups for side in ("before", "after") for value in _values(one, side) if value]
    if not everything:
        return None
    high = max(everything)
    low = max(min(everything), high / 300)  # what is smaller still is all the same
    limits = [low * (high / low) ** (step / STEPS) for step in range(STEPS + 1)]
    rows = tuple(_heat_row(one, limits) for one in groups)
    alphas = [row.alpha for row in rows if row.alpha is not None]
    shown = f"alpha {min(alphas):.2f} to {max(alphas):.2f}" if alphas else ""
    return Heat(
        tuple(str(one) for one in dimensions),
        rows,
        tuple(wording.significant(value) for value in limits),
        shown,
    )


def _values(one: Mapping[str, Any], side: str) -> list[float | None]:
    found = item(one, side)
    return [number(found, place) for place in range(len(found))] if isinstance(found, list) else []


def _heat_row(one: Mapping[str, Any], limits: Sequence[float]) -> HeatRow:
    sides = []
    for side in ("before", "after"):
        sides.append(tuple((_level(value, limits), wording.significant(value, 2)) for value in _values(one, side)))
    known = {side: [value for value in _values(one, side) if value is not None] for side in ("before", "after")}
    return HeatRow(
        text(one, "input"),
        number(one, "alpha"),
        sides[0],
        sides[1],
        max(known["before"], default=None),
        max(known["after"], default=None),
    )


def _level(value: float | None, limits: Sequence[float]) -> int:
    """0 for what was not measured, else 1 to STEPS by the logarithm."""
    if value is None:
        return 0
    if value <= limits[0] or limits[-1] <= limits[0]:
        return 1
    share = math.log(value / limits[0]) / math.log(limits[-1] / limits[0])
    return min(STEPS, 1 + int(share * STEPS))
