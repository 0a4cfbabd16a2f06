"""The roofline page: measured roofs with each product placed under them, and where the time of a pass goes. Pure.

Reads what :mod:`harness.roofline_report` writes; its docstring defines the fields.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dashboards import wording
from dashboards.analyses import Analysis, number, objects, text
from dashboards.frontier import colour

WIDTH, HEIGHT = 720.0, 400.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 24.0, 16.0, 46.0
#: Roofs of these dtypes are drawn, from these levels of memory.
DTYPES = ("int8", "bf16", "fp32")
LEVELS = ("l2", "l3", "memory")
LEVEL_TITLES = {"l2": "L2", "l3": "L3", "memory": "memory"}
PARTS = ("linear", "attention", "other")


@dataclass(frozen=True, slots=True)
class Roof:
    """A line of the picture: a bandwidth's slope or a dtype's flat top, with its words at (x, y)."""

    path: str
    label: str
    x: float
    y: float
    anchor: str
    kind: str


@dataclass(frozen=True, slots=True)
class Placed:
    """A product under its roof; ``y`` None where no kernel of the profile was this product."""

    label: str
    recipe: str
    colour: str
    x: float
    y: float | None
    roof_y: float
    fraction: float | None


@dataclass(frozen=True, slots=True)
class Chart:
    """The picture of one ISA and scenario."""

    roofs: tuple[Roof, ...]
    points: tuple[Placed, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a bar: what it is, where it begins and how long it is in percent, and its seconds."""

    name: str
    start: float
    length: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Bar:
    """Where one recipe's time goes. ``limit``: where its bar would end at its ceiling; ``why`` it has no bar."""

    recipe: str
    parts: tuple[Part, ...]
    seconds: float | None
    speedup: float | None
    linear_speedup: float | None
    ceiling: float | None
    at_roof: float | None
    reached: float | None
    limit: float | None
    linear_share: float | None
    why: str


@dataclass(frozen=True, slots=True)
class Section:
    """One ISA and scenario of one model on one host."""

    model: str
    host: str
    cpu: str
    isa: str
    title: str
    scenario: str
    measured_at: float | None
    threads: int | None
    commit: str
    peaks: tuple[tuple[str, float, str], ...]
    chart: Chart | None
    bars: tuple[Bar, ...]
    rows: tuple[tuple[str, Mapping[str, Any]], ...]


def sections(analyses: Iterable[Analysis], withheld: Collection[tuple[str, str, str]] = ()) -> tuple[Section, ...]:
    """Every section of every file, by model and ISA.

    Args:
        analyses: the files.
        withheld: (model, recipe, ISA) of cells whose accuracy or evidence fails: their speed is not shown.
    """
    found = [_section(one.data, part, withheld) for one in analyses for part in objects(one.data, "sections")]
    order = wording.ISA_ORDER
    return tuple(sorted(found, key=lambda one: (one.model, wording.rank(one.isa, order), one.scenario, one.host)))


def _section(data: Mapping[str, Any], part: Mapping[str, Any], withheld: Collection[tuple[str, str, str]]) -> Section:
    model, isa = text(data, "model"), text(part, "isa")
    recipes = objects(part, "recipes")
    hidden = {name for name in (text(one, "recipe") for one in recipes) if (model, name, isa) in withheld}
    shown = [one for one in recipes if text(one, "recipe") not in hidden]
    threads = number(part, "threads")
    return Section(
        model=model,
        host=text(data, "host"),
        cpu=text(data, "cpu"),
        isa=isa,
        title=f"{model}, {wording.isa_title(isa)}",
        scenario=text(part, "scenario"),
        measured_at=number(part, "measured_at"),
        threads=None if threads is None else int(threads),
        commit=text(part, "commit"),
        peaks=_peaks(part),
        chart=_chart(part, shown),
        bars=_bars(recipes, hidden),
        rows=tuple((text(one, "recipe"), _row(point)) for one in shown for point in objects(one, "points")),
    )


def _row(point: Mapping[str, Any]) -> dict[str, Any]:
    """A product for the table: every field there, of the right kind or None."""
    words = {name: text(point, name) for name in ("label", "kind", "dtype", "weights_from", "bound")}
    sizes = {name: wording.count(number(point, name)) for name in ("m", "n", "k", "batch", "calls")}
    rates = ("intensity", "attainable", "ops_per_s", "seconds", "fraction")
    return {**words, **sizes, **{name: number(point, name) for name in rates}}


def _peaks(part: Mapping[str, Any]) -> tuple[tuple[str, float, str], ...]:
    """Name, value and unit of each roof."""
    operations = [(name, number(part, "peaks", "operations", name), "operations/s") for name in DTYPES]
    bandwidth = [(LEVEL_TITLES[name], number(part, "peaks", "bandwidth", name), "bytes/s") for name in LEVELS]
    return tuple((name, value, unit) for name, value, unit in [*operations, *bandwidth] if value)


@dataclass(frozen=True, slots=True)
class _Scale:
    """From numbers to the picture, both axes logarithmic."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        share = math.log(value / self.x_low) / math.log(self.x_high / self.x_low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = math.log(value / self.y_low) / math.log(self.y_high / self.y_low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _positive(value: float | None) -> float | None:
    return value if value is not None and value > 0 else None


def _chart(part: Mapping[str, Any], recipes: Iterable[Mapping[str, Any]]) -> Chart | None:
    """None without a roof or without a product."""
    peaks = {name: value for name in DTYPES if (value := _positive(number(part, "peaks", "operations", name)))}
    bands = {name: value for name in LEVELS if (value := _positive(number(part, "peaks", "bandwidth", name)))}
    points = [
        (text(recipe, "recipe"), point, intensity, attainable, _positive(number(point, "ops_per_s")))
        for recipe in recipes
        for point in objects(recipe, "points")
        if (intensity := _positive(number(point, "intensity")))
        and (attainable := _positive(number(point, "attainable")))
    ]
    if not peaks or not bands or not points:
        return None
    scale = _scale_of(peaks, bands, points)
    placed = tuple(
        Placed(
            text(point, "label"),
            recipe,
            colour(recipe),
            scale.x(intensity),
            None if measured is None else scale.y(measured),
            scale.y(attainable),
            number(point, "fraction"),
        )
        for recipe, point, intensity, attainable, measured in points
    )
    return Chart(
        tuple(_roofs(peaks, bands, scale)),
        placed,
        tuple((scale.x(tick), _power(tick)) for tick in _decades(scale.x_low, scale.x_high, 4.0)),
        tuple((scale.y(tick), wording.significant(tick / 1e9)) for tick in _decades(scale.y_low, scale.y_high, 10.0)),
    )


def _scale_of(peaks: Mapping[str, float], bands: Mapping[str, float], points: Iterable[tuple[Any, ...]]) -> _Scale:
    points = list(points)
    intensities = [point[2] for point in points]
    heights = [height for point in points for height in (point[3], point[4]) if height]
    x_low, x_high = min(intensities) / 4, max(*intensities, max(peaks.values()) / min(bands.values())) * 2
    return _Scale(x_low, x_high, min(*heights, *peaks.values()) / 3, max(*heights, *peaks.values()) * 1.8)


def _roofs(peaks: Mapping[str, float], bands: Mapping[str, float], scale: _Scale) -> Iterable[Roof]:
    widest, top = max(bands.values()), max(peaks.values())
    for name, band in bands.items():
        start = max(scale.x_low, scale.y_low / band)
        end = min(top / band, scale.x_high)
        if start >= end:
            continue
        path = f"M{scale.x(start):.1f} {scale.y(start * band):.1f}L{scale.x(end):.1f} {scale.y(end * band):.1f}"
        at = start * (end / start) ** 0.22
        words = f"{LEVEL_TITLES[name]}, {wording.significant(band / 1e9)} GB/s"
        yield Roof(path, words, scale.x(at) - 4, scale.y(at * band) - 6, "start", "band")
    for name, peak in peaks.items():
        begin = max(scale.x_low, min(peak / widest, scale.x_high))
        path = f"M{scale.x(begin):.1f} {scale.y(peak):.1f}H{WIDTH - RIGHT:.1f}"
        words = f"{name.upper()}, {wording.significant(peak / 1e9)} G/s"
        yield Roof(path, words, WIDTH - RIGHT - 2, scale.y(peak) - 6, "end", "peak")


def _decades(low: float, high: float, base: float) -> list[float]:
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    return [base**power for power in range(first, last + 1)]


def _power(value: float) -> str:
    return wording.count(round(value)) if value >= 1 else f"1/{round(1 / value)}"


def _bars(recipes: Iterable[Mapping[str, Any]], hidden: Collection[str]) -> tuple[Bar, ...]:
    recipes = list(recipes)
    totals = [sum(number(one, "time_split_s", name) or 0.0 for name in PARTS) for one in recipes]
    longest = max(totals, default=0.0)
    baseline = next((total for one, total in zip(recipes, totals, strict=True) if text(one, "recipe") == "fp32"), 0.0)
    return tuple(_bar(one, longest, baseline, text(one, "recipe") in hidden) for one in recipes)


def _bar(one: Mapping[str, Any], longest: float, baseline: float, hidden: bool) -> Bar:
    seconds = [(name, number(one, "time_split_s", name)) for name in PARTS]
    why = "its accuracy or evidence fails: speed withheld" if hidden else ""
    if not why and (longest <= 0 or any(value is None for _, value in seconds)):
        why = text(one, "reason") or "its time was not split"
    parts, start = [], 0.0
    for name, value in seconds if not why else ():
        length = 100 * (value or 0.0) / longest
        parts.append(Part(name, start, length, value or 0.0))
        start += length
    ceiling = None if hidden else _positive(number(one, "ceiling", "ceiling"))
    limit = 100 * baseline / ceiling / longest if ceiling and longest > 0 and baseline else None
    return Bar(
        recipe=text(one, "recipe"),
        parts=tuple(parts),
        seconds=None if hidden else number(one, "seconds"),
        speedup=None if hidden else number(one, "speedup", "value"),
        linear_speedup=None if hidden else number(one, "linear_speedup", "value"),
        ceiling=ceiling,
        at_roof=None if hidden else number(one, "ceiling", "at_roof"),
        reached=None if hidden else number(one, "ceiling", "reached"),
        limit=limit,
        linear_share=number(one, "ceiling", "linear_share"),
        why=why,
    )
