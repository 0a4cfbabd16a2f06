"""Accuracy loss against speed-up, all recipes and engines of a model: which choices nothing else beats. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dashboards import wording
from dashboards.facts import PASS, Facts
from harness.records import slug

WIDTH, HEIGHT = 720.0, 380.0
LEFT, RIGHT, TOP, BOTTOM = 56.0, 24.0, 18.0, 48.0


#: Left, top, right, bottom.
Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Dot:
    """One recipe of one engine. Positions in the picture's units; ``best``: on the frontier."""

    facts: Facts
    label: str
    x: float
    y: float
    x_low: float
    x_high: float
    y_low: float
    y_high: float
    best: bool
    shape: str
    colour: str
    label_x: float
    label_y: float
    anchor: str
    href: str


@dataclass(frozen=True, slots=True)
class Chart:
    """The picture of one model, ISA and scenario. ``left_out``: cells without a place, and why."""

    title: str
    model: str
    isa: str
    scenario: str
    dots: tuple[Dot, ...]
    line: str
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    zero_x: float
    one_y: float
    left_out: tuple[tuple[Facts, str], ...]


SHAPES = {
    "int8": "circle",
    "torchao": "square",
    "openvino": "diamond",
    "onnxruntime": "triangle",
    "ctranslate2": "cross",
}
#: Recipe to colour class: fixed, so that a recipe looks the same on every page and every night.
COLOURS = {name: f"c{place % 8}" for place, name in enumerate(wording.RECIPE_ORDER)}


def colour(recipe: str) -> str:
    """The colour class of a recipe; unknown ones share one of eight by their name."""
    return COLOURS.get(recipe, f"c{sum(recipe.encode('utf-8', 'replace')) % 8}")


def _ticks(low: float, high: float, most: int = 6) -> list[float]:
    span = high - low
    step = 10 ** math.floor(math.log10(span / most)) if span > 0 else 1.0
    for factor in (1, 2, 5, 10):
        if span / (step * factor) <= most:
            step *= factor
            break
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _loss(tick: float) -> str:
    text = f"{100 * tick:+.3g}".replace("-", "−")
    return "0" if abs(tick) < 1e-9 else text


def _undominated(facts: list[Facts]) -> set[str]:
    """Keys of those that no other beats both in accuracy and in speed."""
    best: set[str] = set()
    for one in facts:
        if one.accuracy is None or one.speedup is None:
            continue
        beaten = any(
            other.accuracy is not None
            and other.speedup is not None
            and other.accuracy.delta >= one.accuracy.delta
            and other.speedup >= one.speedup
            and (other.accuracy.delta, other.speedup) != (one.accuracy.delta, one.speedup)
            for other in facts
        )
        if not beaten:
            best.add(one.key)
    return best


def _label_place(label: str, x: float, y: float, taken: list[Box]) -> tuple[float, float, str]:
    """Where the words of a dot go: the first place around it that is free, else above it. Marks the place as taken."""
    width = 6.4 * len(label)
    chosen = None
    for dy in (-9.0, 17.0, -23.0, 31.0):
        for anchor in ("start", "end"):
            left = x + 9 if anchor == "start" else x - 9 - width
            box = (left, y + dy - 10, left + width, y + dy + 3)
            inside = box[0] >= LEFT and box[2] <= WIDTH - 4 and box[1] >= 4 and box[3] <= HEIGHT - BOTTOM
            free = not any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken)
            if inside and free:
                taken.append(box)
                return (x + 9 if anchor == "start" else x - 9), y + dy, anchor
            if inside and chosen is None:
                chosen = (x + 9 if anchor == "start" else x - 9), y + dy, anchor
    return chosen or (x, y - 9, "middle")


def why_left_out(facts: Facts) -> str | None:
    """Why a cell has no place on the chart; None where it has one."""
    if facts.status != "ok":
        return f"{facts.status}: {facts.reason or 'no reason was recorded'}"
    if facts.withheld:
        return f"accuracy fails: {facts.trust.reason}"
    if facts.accuracy is None:
        return "its accuracy was not judged"
    if facts.trust.outcome != PASS:
        return f"no accuracy verdict: {facts.trust.reason}"
    if facts.speedup is None:
        return "no FP32 baseline in its run"
    return None


def chart(model: str, isa: str, scenario: str, facts: Iterable[Facts]) -> Chart | None:
    """The chart of one model, ISA and scenario; None where no cell has both an accuracy that passes and a speed-up."""
    everything = list(facts)
    left_out = tuple((one, why) for one in everything if (why := why_left_out(one)) is not None)
    placed = [one for one in everything if why_left_out(one) is None]
    if not placed:
        return None
    # The loss is drawn as -delta: right is worse. An interval wider than the chart is cut at its edge.
    losses = [-one.accuracy.delta for one in placed if one.accuracy is not None]
    ends = [-end for one in placed if one.accuracy is not None for end in one.accuracy.delta_ci95 or ()]
    span = max(max(losses) - min(losses), 0.001)
    x_low = max(min(0.0, *losses, *ends), min(losses) - 0.6 * span) - 0.04 * span
    x_high = min(max(0.0, *losses, *ends), max(losses) + 0.6 * span) + 0.04 * span
    y_high = 1.12 * max(max(one.speedup or 0.0, (one.speedup_ci or (0.0, 0.0))[1]) for one in placed)
    y_high = max(y_high, 1.3)

    def x(value: float) -> float:
        inside = min(max(value, x_low), x_high)
        return LEFT + (inside - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        inside = min(max(value, 0.0), y_high)
        return HEIGHT - BOTTOM - inside / y_high * (HEIGHT - TOP - BOTTOM)

    best = _undominated(placed)
    dots: list[Dot] = []
    taken: list[Box] = [
        (x(-one.accuracy.delta) - 8, y(one.speedup) - 8, x(-one.accuracy.delta) + 8, y(one.speedup) + 8)
        for one in placed
        if one.accuracy is not None and one.speedup is not None
    ]
    for one in sorted(placed, key=lambda one: -(one.speedup or 0.0)):
        assert one.accuracy is not None and one.speedup is not None
        delta_low, delta_high = one.accuracy.delta_ci95 or (one.accuracy.delta, one.accuracy.delta)
        low, high = one.speedup_ci or (one.speedup, one.speedup)
        at_x, at_y = x(-one.accuracy.delta), y(one.speedup)
        label = f"{one.cell.engine} {one.cell.recipe}" + ("" if one.cell.deploy == "jit" else f" {one.cell.deploy}")
        label_x, label_y, anchor = _label_place(label, at_x, at_y, taken)
        dots.append(
            Dot(
                one,
                label,
                at_x,
                at_y,
                x(-delta_high),
                x(-delta_low),
                y(low),
                y(high),
                one.key in best,
                SHAPES.get(one.cell.engine, "circle"),
                colour(one.cell.recipe),
                label_x,
                label_y,
                anchor,
                f"series/{slug(one.key)}.html",
            )
        )
    on_line = sorted((dot for dot in dots if dot.best), key=lambda dot: dot.x)
    line = "M" + "L".join(f"{dot.x:.1f} {dot.y:.1f}" for dot in on_line) if len(on_line) > 1 else ""
    return Chart(
        title=f"{model}, {wording.isa_title(isa)}",
        model=model,
        isa=isa,
        scenario=scenario,
        dots=tuple(dots),
        line=line,
        x_ticks=tuple((x(tick), _loss(tick)) for tick in _ticks(x_low, x_high)),
        y_ticks=tuple((y(tick), f"{tick:g}×") for tick in _ticks(0.0, y_high)),
        zero_x=x(0.0),
        one_y=y(1.0),
        left_out=left_out,
    )


def charts(facts: Iterable[Facts]) -> tuple[Chart, ...]:
    """A chart for each model, ISA and scenario that has something to show."""
    groups: dict[tuple[str, str, str], list[Facts]] = {}
    for one in facts:
        groups.setdefault((one.cell.model, one.cell.isa, one.cell.scenario), []).append(one)
    ordered = sorted(
        groups.items(), key=lambda item: (item[0][0], wording.rank(item[0][1], wording.ISA_ORDER), item[0][2])
    )
    made = [chart(*name, members) for name, members in ordered]
    return tuple(one for one in made if one is not None)
