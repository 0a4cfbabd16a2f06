"""What the history rules can see, and how often they cry wolf: figures from simulated series with known changes.

    python -m harness.gate_power [--series 200] [--nights 1095] [--seed 0] [--json FILE] [--plot FILE.html]

A simulated store of three years: run-to-run noise of 1 % (Student's t with three degrees of freedom, scaled to that
standard deviation, so that large deviations are common), noisier series among them, wild nights of single series and of
the whole host. In it, clean series count false alarms; series with a step count how soon it is found; series that
drift count how far they get. Each night is judged by the functions that ``harness gate`` calls (``harness.trends``), as
one of so many cells. Same seed, same figures.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness import trends
from harness.progress import say
from harness.stats import Array
from harness.trends import Trend, TrendRules

#: Standard deviations of run-to-run noise, and the share of the series that have them.
NOISES = ((0.01, 0.80), (0.02, 0.15), (0.03, 0.05))
#: Chance of a wild night, of one series and of all series of the host at once.
WILD_SERIES, WILD_HOST = 0.01, 0.01
#: Runs before a change is made, so that there is a level to leave.
BEFORE = 90
#: Weekly drift whose finding is measured.
DRIFT_A_WEEK = 0.001
#: Cells of one model and recipe, whose geometric mean is judged too; and cells judged beside one that changed.
GROUP, BESIDE = 8, 199
#: What is promised for noise of 1 %: (step, share found, runs within), clean nights alarmed at most, drift found by.
PROMISED_STEPS = ((0.05, 0.95, 3), (0.03, 0.95, 10))
PROMISED_CLEAN, PROMISED_DRIFT = 0.01, 0.02


@dataclass(frozen=True)
class Clean:
    """False alarms on series without any change, slower or faster. Rates are fractions of the nights that could be
    judged: of those on which an alarm of any series or group began, of those on which one stood; and of single series'
    nights."""

    series: int
    nights: int
    alarms: int
    series_nights_alarmed: float
    nights_alarm_began: float
    nights_alarmed: float
    nights_regression: float


@dataclass(frozen=True)
class Steps:
    """How soon a step of ``size`` is found at noise ``sigma``: cumulative share found within 1, 2, 3... runs."""

    size: float
    sigma: float
    tries: int
    within: tuple[float, ...]


@dataclass(frozen=True)
class Drifts:
    """How far a drift of 0.1 % a week got when it was found, as a fraction; ``missed`` never were."""

    sigma: float
    tries: int
    missed: int
    median_total: float
    p95_total: float
    by_promise: float


def noise(rng: np.random.Generator, series: int, nights: int, sigmas: Array) -> Array:
    """(series, nights) log costs without any change: heavy-tailed noise of standard deviation ``sigmas`` (series,), and
    wild nights, which are only ever slower."""
    plain = rng.standard_t(3, (series, nights)) / math.sqrt(3) * sigmas[:, None]
    wild = (rng.random((series, nights)) < WILD_SERIES) | (rng.random(nights) < WILD_HOST)
    logs: Array = plain + wild * rng.uniform(0.05, 0.30, (series, nights))
    return logs


def mixed_sigmas(series: int) -> Array:
    """(series,) standard deviations in the shares of :data:`NOISES`."""
    bounds = np.cumsum([share for _, share in NOISES]) * series
    which = np.searchsorted(bounds, np.arange(series), side="right")
    return np.array([sigma for sigma, _ in NOISES])[np.minimum(which, len(NOISES) - 1)]


def measure_clean(series: int, nights: int, seed: int, rules: TrendRules | None = None) -> Clean:
    """False alarms of a store without any change, its cells in groups of :data:`GROUP`."""
    logs = noise(np.random.default_rng(seed), series, nights, mixed_sigmas(series))
    costs = [
        *np.exp(logs),
        *(trends.geomean(list(np.exp(group))) for group in np.array_split(logs, max(series // GROUP, 1))),
    ]
    swept = _shared_out(functools.partial(_swept, rules=rules), costs)
    slower, faster = np.zeros((2, len(costs), nights), dtype=bool)
    for night in range(nights):
        judged = [(row, one) for row, each in enumerate(swept) if (one := each[night]) is not None]
        for (row, one), real in zip(judged, trends.real([one for _, one in judged], rules), strict=True):
            slower[row, night], faster[row, night] = _alarmed(one, real)
    alarmed = slower | faster
    began = alarmed & ~np.pad(alarmed, ((0, 0), (1, 0)))[:, :-1]
    counted = slice(next((night for night in range(nights) if any(each[night] for each in swept)), 0), None)
    return Clean(
        series,
        nights,
        int(began.sum()),
        float(alarmed[:, counted].mean()),
        float(began[:, counted].any(axis=0).mean()),
        float(alarmed[:, counted].any(axis=0).mean()),
        float(slower[:, counted].any(axis=0).mean()),
    )


def _swept(costs: Array, rules: TrendRules | None) -> list[Trend | None]:
    return trends.sweep(costs.tolist(), None, rules)


def _alarmed(one: Trend, real: bool) -> tuple[bool, bool]:
    """Whether a trend is called slower, and whether it is called faster."""
    step = one.change.size if real and one.change is not None else 0.0
    creeps = one.drift or 0.0
    return step > 0 or creeps > 0 or one.sudden, step < 0 or creeps < 0


def _shared_out(work: Callable[[Array], Any], rows: Sequence[Array]) -> list[Any]:
    """``work`` of each row, on all CPUs that this process may use."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(work, rows, chunksize=4))


def _slower_at(costs: Array, rules: TrendRules | None) -> int | None:
    """The first run from :data:`BEFORE` on at which the series is called slower, judged beside :data:`BESIDE` quiet
    ones; the run before is the pinned release."""
    said = trends.Accepted(pinned=BEFORE - 1)
    for now, one in enumerate(trends.sweep(costs.tolist(), said, rules, BEFORE), start=BEFORE):
        if one is not None and _alarmed(one, trends.believed([one.p_value, *[1.0] * BESIDE], rules)[0])[0]:
            return now
    return None


def measure_steps(
    size: float, sigma: float, tries: int, seed: int, runs: int = 20, rules: TrendRules | None = None
) -> Steps:
    """How many runs it takes to find a step."""
    logs = noise(np.random.default_rng(seed), tries, BEFORE + runs, np.full(tries, sigma))
    logs[:, BEFORE:] += math.log1p(size)
    found = _shared_out(functools.partial(_slower_at, rules=rules), list(np.exp(logs)))
    delays = np.array([math.inf if now is None else now - BEFORE + 1 for now in found])
    return Steps(size, sigma, tries, tuple(float(np.mean(delays <= run)) for run in range(1, runs + 1)))


def measure_drift(sigma: float, tries: int, seed: int, weeks: int = 40, rules: TrendRules | None = None) -> Drifts:
    """How far a series drifts until it is called slower. The drift begins the night after the pinned release."""
    nights = 7 * weeks
    logs = noise(np.random.default_rng(seed), tries, BEFORE + nights, np.full(tries, sigma))
    totals = np.arange(1, nights + 1) * DRIFT_A_WEEK / 7
    logs[:, BEFORE:] += np.log1p(totals)
    found = _shared_out(functools.partial(_slower_at, rules=rules), list(np.exp(logs)))
    seen = np.array([totals[night - BEFORE] for night in found if night is not None])
    missed = sum(night is None for night in found)
    reached = np.array([math.inf if night is None else totals[night - BEFORE] for night in found])
    median, p95 = (float(np.quantile(seen, q)) if len(seen) else math.nan for q in (0.5, 0.95))
    return Drifts(sigma, tries, missed, median, p95, float(np.mean(reached <= PROMISED_DRIFT)))


@dataclass(frozen=True)
class Power:
    """All figures of one simulation."""

    seed: int
    clean: Clean
    steps: tuple[Steps, ...]
    drifts: tuple[Drifts, ...]


def measure(
    series: int = 200, nights: int = 1095, seed: int = 0, tries: int = 400, tell: Callable[[str], None] = say
) -> Power:
    """Every figure. Takes three minutes of one core at the defaults; ``tell`` hears how it goes on."""
    steps = []
    for index, (sigma, size) in enumerate((sigma, size) for sigma, _ in NOISES for size in (0.03, 0.05, 0.08, 0.20)):
        tell(f"steps of {size:.0%} at noise {sigma:.0%}")
        steps.append(measure_steps(size, sigma, tries, seed + 1 + index))
    drifts = []
    for index, (sigma, _) in enumerate(NOISES):
        tell(f"drift at noise {sigma:.0%}")
        drifts.append(measure_drift(sigma, max(tries // 4, 1), seed + 100 + index))
    tell(f"{series} clean series over {nights} nights")
    return Power(seed, measure_clean(series, nights, seed), tuple(steps), tuple(drifts))


@dataclass(frozen=True)
class Promise:
    """What is promised for noise of 1 %, and what the simulation reached, as fractions."""

    what: str
    needed: float
    reached: float
    at_most: bool = False

    @property
    def kept(self) -> bool:
        """Whether it was reached."""
        return self.reached <= self.needed if self.at_most else self.reached >= self.needed


def promises(power: Power) -> list[Promise]:
    """The promises of docs/gates.md beside what was reached."""
    found = [
        Promise(f"steps of {size:.0%} found within {runs} runs", share, step.within[runs - 1])
        for size, share, runs in PROMISED_STEPS
        for step in power.steps
        if (step.size, step.sigma) == (size, NOISES[0][0])
    ]
    drifts = [one for one in power.drifts if one.sigma == NOISES[0][0]]
    found += [Promise("drift of 0.1 % a week found before it totals 2 %", 0.95, one.by_promise) for one in drifts]
    return [*found, Promise("clean nights alarmed", PROMISED_CLEAN, power.clean.nights_alarmed, at_most=True)]


def text(power: Power) -> str:
    """The figures as lines for people."""
    clean = power.clean
    lines = [
        f"clean: {clean.series} series x {clean.nights} nights: {clean.alarms} false alarms; an alarm began on "
        f"{100 * clean.nights_alarm_began:.2f} % of nights and stood on {100 * clean.nights_alarmed:.2f} % (as a "
        f"regression on {100 * clean.nights_regression:.2f} %), on {100 * clean.series_nights_alarmed:.4f} % of single "
        "series' nights",
        "",
        "noise  step   found within 3 runs   5      10     20",
    ]
    for step in power.steps:
        shares = [f"{100 * step.within[run - 1]:5.1f} %" for run in (3, 5, 10, 20)]
        lines.append(f"{100 * step.sigma:4.0f} % {100 * step.size:4.0f} %             " + "".join(shares))
    lines += ["", "drift of 0.1 % a week: its total when found"]
    for one in power.drifts:
        lines.append(
            f"noise {100 * one.sigma:.0f} %: median {100 * one.median_total:.2f} %, 95 % of them by "
            f"{100 * one.p95_total:.2f} %; {one.missed} of {one.tries} missed"
        )
    lines += ["", "promised at noise 1 %"]
    for promise in promises(power):
        word, bound = "kept" if promise.kept else "MISSED", "at most" if promise.at_most else "at least"
        lines.append(f"{word}: {promise.what}: {100 * promise.reached:.2f} %, {bound} {100 * promise.needed:g} %")
    return "\n".join(lines)


def plot(power: Power, path: Path) -> None:
    """Shares of steps found by runs since the step, and how far drifts got, as one HTML file."""
    from plotly.subplots import make_subplots

    titles = ("How soon a step is found", "How far a drift of 0.1 % a week gets")
    figure = make_subplots(rows=1, cols=2, subplot_titles=titles, column_widths=[0.65, 0.35])
    for step in power.steps:
        name = f"{100 * step.size:.0f} % at noise {100 * step.sigma:.0f} %"
        runs = list(range(1, len(step.within) + 1))
        figure.add_scatter(x=runs, y=step.within, name=name, mode="lines+markers", row=1, col=1)
    noises = [f"noise {100 * one.sigma:.0f} %" for one in power.drifts]
    for name, totals in (
        ("median total when found", [one.median_total for one in power.drifts]),
        ("95 % are found by", [one.p95_total for one in power.drifts]),
    ):
        figure.add_bar(x=noises, y=totals, name=name, row=1, col=2)
    figure.update_xaxes(title_text="runs since the step", row=1, col=1)
    figure.update_yaxes(title_text="share found", range=[0, 1], row=1, col=1)
    figure.update_yaxes(title_text="total drift", tickformat=".1%", row=1, col=2)
    nights = f"{100 * power.clean.nights_alarmed:.2f} % of {power.clean.nights} clean nights alarmed"
    figure.update_layout(title=f"What the history rules see: {nights} ({power.clean.series} series)")
    figure.write_html(path, include_plotlyjs=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.gate_power",
        description="What the history rules can see.",
        epilog="Example: python -m harness.gate_power --plot power.html --check",
    )
    parser.add_argument("--series", type=int, default=200, help="series of the store without change (default 200)")
    parser.add_argument("--nights", type=int, default=1095, help="nights of that store (default 1095)")
    parser.add_argument("--tries", type=int, default=400, help="series for each step that is made (default 400)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same figures (default 0)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--plot", type=Path, help="also draw them here, as HTML")
    parser.add_argument("--check", action="store_true", help="exit 1 if a promise for noise of 1 %% is not kept")
    options = parser.parse_args(arguments)
    power = measure(options.series, options.nights, options.seed, options.tries)
    print(text(power))
    if options.json:
        options.json.write_text(json.dumps(asdict(power), indent=1) + "\n", encoding="utf-8")
    if options.plot:
        plot(power, options.plot)
    return int(options.check and not all(promise.kept for promise in promises(power)))


if __name__ == "__main__":
    sys.exit(main())
