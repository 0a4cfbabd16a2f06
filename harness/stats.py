"""Statistics of times and of paired predictions. Pure: no input or output, no clock, no torch, seeds fixed.

Times are compared as *speed ratios*: the reference's time over the cell's time, so 1.2 is 20 % faster and 0.8 is 20 %
less speed. Ratios are worked on as logarithms, because slowing down by a factor and speeding up by it are then the same
distance. What is resampled is never the single iteration: iterations of one process share its memory layout, its heap
and its moment, so they agree with each other far better than with the next process (T. Kalibera, R. Jones, "Rigorous
benchmarking in reasonable time", ISMM 2013).
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

from harness.records import Round, Speedup, Timing

Array = npt.NDArray[np.float64]
Interval = tuple[float, float]

#: Every random draw in this module starts from this seed unless the caller says otherwise: same data, same interval.
SEED = 2211
#: Resamples of a bootstrap. The ends of a 95 % interval then move by well under a tenth of its width between seeds.
RESAMPLES = 4000


@dataclass(frozen=True)
class Ratio:
    """A speed ratio (reference's time over the cell's; no unit) and how sure it is.

    ``interval`` is None where there is one unit only, so that nothing is known about its spread. ``unit`` names what
    was resampled: ``round`` or ``process``; ``units`` is the smaller of the two sides' numbers of them.
    """

    value: float
    interval: Interval | None
    unit: str
    units: int


def round_time_s(one: Round) -> float | None:
    """Median time of an iteration in one round, in seconds; None where it has none or any is not a positive number."""
    if not one.samples_s or not all(math.isfinite(sample) and sample > 0 for sample in one.samples_s):
        return None
    return float(statistics.median(one.samples_s))


def round_times_s(timing: Timing) -> Array | None:
    """Median time of an iteration for each round, in seconds, in the order measured; None if any cannot be used."""
    times = [round_time_s(one) for one in timing.rounds]
    usable = [time for time in times if time is not None]
    return np.array(usable) if usable and len(usable) == len(times) else None


def median_time_s(timing: Timing) -> float | None:
    """Median over rounds of the rounds' median times, in seconds; None where nothing usable was measured."""
    times = round_times_s(timing)
    return None if times is None else float(np.median(times))


def expanded_level(units: int, level: float = 0.95) -> float:
    """The tail probability at which a percentile bootstrap over few ``units`` is cut for a true ``level`` interval.

    The plain percentile interval is too narrow by sqrt((n-1)/n) and ignores that the spread itself is estimated.
    T. Hesterberg ("What teachers should know about the bootstrap", The American Statistician 69, 2015, section 5.3)
    cuts it at Phi(-sqrt(n/(n-1)) * t) instead, where t is Student's quantile with n-1 degrees of freedom.
    """
    if units < 2:
        raise ValueError(f"an interval needs at least two units, not {units}")
    quantile = float(special.stdtrit(units - 1, 0.5 + level / 2))
    return float(special.ndtr(-math.sqrt(units / (units - 1)) * quantile))


def percentile_interval(replicates: Array, units: int, level: float = 0.95) -> Interval:
    """The expanded percentile interval of bootstrap ``replicates`` (R,) drawn over ``units`` units."""
    tail = expanded_level(units, level)
    low, high = np.quantile(replicates, (tail, 1.0 - tail))
    return float(low), float(high)


def processes(timing: Timing) -> tuple[Array, ...] | None:
    """Median iteration time of each round, in seconds, grouped by process; None if any cannot be used."""
    times = round_times_s(timing)
    if times is None:
        return None
    labels = [one.process for one in timing.rounds]
    return tuple(times[[label == own for label in labels]] for own in dict.fromkeys(labels))


def speed_ratio(baseline: Timing, cell: Timing, resamples: int = RESAMPLES, seed: int = SEED) -> Ratio | None:
    """Speed of ``cell`` relative to ``baseline``, measured in two runs: 0.8 has lost a fifth of its speed.

    A side's time is the median over its processes of the median over a process's rounds. The sides were not measured
    next to each other, so they are resampled independently: processes and then rounds inside each where both sides have
    at least two processes, otherwise rounds (``unit`` says which; the spread between processes is then not in it).

    Returns:
        None where either side was not measured, or holds a time that is not a positive number.
    """
    slow, fast = processes(baseline), processes(cell)
    if slow is None or fast is None:
        return None
    value = _typical_s(slow) / _typical_s(fast)
    by_process = min(len(slow), len(fast)) >= 2
    if not by_process:
        slow, fast = (np.concatenate(slow),), (np.concatenate(fast),)
    units = min(len(slow), len(fast)) if by_process else min(len(slow[0]), len(fast[0]))
    unit = "process" if by_process else "round"
    if units < 2 or resamples < 1:
        return Ratio(value, None, unit, units)
    rng = np.random.default_rng(seed)
    replicates = np.log(_resampled_s(slow, rng, resamples)) - np.log(_resampled_s(fast, rng, resamples))
    low, high = percentile_interval(replicates, units)
    return Ratio(value, (math.exp(low), math.exp(high)), unit, units)


def _typical_s(groups: tuple[Array, ...]) -> float:
    return float(np.median([np.median(group) for group in groups]))


def _resampled_s(groups: tuple[Array, ...], rng: np.random.Generator, resamples: int) -> Array:
    """(resamples,) typical times: processes drawn with replacement, rounds drawn anew in each of them once."""
    medians = np.stack(
        [np.median(group[rng.integers(len(group), size=(resamples, len(group)))], axis=1) for group in groups]
    )
    chosen = rng.integers(len(groups), size=(len(groups), resamples))
    typical: Array = np.median(np.take_along_axis(medians, chosen, axis=0), axis=0)
    return typical


def at_chance(value: float, chance: float, n: int) -> bool:
    """True if a score over ``n`` examples is not above ``chance`` by a one-sided 5 % test of a proportion."""
    spread = math.sqrt(max(chance * (1.0 - chance), 0.0) / n)
    return value <= chance + float(special.ndtri(0.95)) * spread


def speedup(baseline: Timing, cell: Timing) -> Speedup | None:
    """How many times faster ``cell`` is than ``baseline``, both measured in one run with their rounds interleaved.

    The n-th round of the one is paired with the n-th of the other, which ran next to it, so a drift of the machine
    cancels; rounds without a partner are left out. ``value`` is the median over pairs of the ratio of the rounds'
    median times; ``ci95`` a bootstrap over pairs (None with fewer than two). With one process a cell, the spread
    between processes is not in the interval.

    Returns:
        None where either was not measured, or holds a time that is not a positive number.
    """
    slow, fast = round_times_s(baseline), round_times_s(cell)
    if slow is None or fast is None:
        return None
    pairs = min(len(slow), len(fast))
    log_ratios = np.log(slow[:pairs]) - np.log(fast[:pairs])
    value = float(np.exp(np.median(log_ratios)))
    if pairs < 2:
        return Speedup(value)
    draws = np.random.default_rng(SEED).integers(pairs, size=(RESAMPLES, pairs))
    low, high = percentile_interval(np.median(log_ratios[draws], axis=1), pairs)
    return Speedup(value, (math.exp(low), math.exp(high)))
