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
from collections.abc import Callable
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


def typical_s(timing: Timing) -> float | None:
    """Time of an iteration as :func:`speed_ratio` compares it: the median over processes of the median over a process's
    rounds, in seconds; None where nothing usable was measured."""
    found = processes(timing)
    return None if found is None else _typical_s(found)


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


# --- paired predictions -----------------------------------------------------------------------------------------------


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided p-value of McNemar's exact test: how likely so uneven a split of the changed examples is by chance.

    Of the examples that only one of two models gets right, ``gained`` count for the new one and ``lost`` against it;
    if both are equally good, each of them is a fair coin (Q. McNemar, Psychometrika 12, 1947; exact binomial form).
    1 where no example changed.
    """
    if min(gained, lost) < 0:
        raise ValueError(f"counts cannot be negative: gained {gained}, lost {lost}")
    changed = gained + lost
    return 1.0 if changed == 0 else min(1.0, 2.0 * float(special.bdtr(min(gained, lost), changed, 0.5)))


def paired_difference(
    scores: Array, reference: Array, level: float = 0.95, resamples: int = RESAMPLES, seed: int = SEED
) -> tuple[float, Interval]:
    """Mean difference of two models' scores (n,) on the same examples, and its paired bootstrap interval.

    For accuracy a score is 0 or 1; any score of a single example will do (F1, exact match). Examples are resampled with
    both their scores together (B. Efron, R. Tibshirani, "An introduction to the bootstrap", 1993, section 8.3). Drawing
    how often each *distinct* difference occurs is the same as drawing examples, and takes no memory that grows with n.

    Raises:
        ValueError: no examples, lengths that differ, or a score that is no finite number.
    """
    if scores.shape != reference.shape or scores.ndim != 1 or not len(scores):
        raise ValueError(f"paired scores need one number an example: got shapes {scores.shape} and {reference.shape}")
    differences = scores.astype(np.float64) - reference.astype(np.float64)
    if not np.isfinite(differences).all():
        raise ValueError("paired scores must be finite numbers")
    distinct, counts = np.unique(differences, return_counts=True)
    n = len(differences)
    draws = np.random.default_rng(seed).multinomial(n, counts / n, size=resamples)
    tail = (1.0 - level) / 2
    low, high = np.quantile(draws @ distinct / n, (tail, 1.0 - tail))
    return float(differences.mean()), (float(low), float(high))


# --- processes of two revisions, measured in turns --------------------------------------------------------------------


def hodges_lehmann(values: Array) -> Array:
    """Hodges-Lehmann estimate of the centre along the last axis: the median of the means of all pairs, self-pairs
    included.

    Nearly as sharp as the mean on normal noise (95 %), and unmoved by up to 29 % of wild values, where a median of few
    values wastes a third of them (J. Hodges, E. Lehmann, Annals of Mathematical Statistics 34, 1963).
    """
    first, second = np.triu_indices(values.shape[-1])
    centre: Array = np.median((values[..., first] + values[..., second]) / 2, axis=-1)
    return centre


def process_ratio(
    baseline: tuple[Array, ...], candidate: tuple[Array, ...], resamples: int = RESAMPLES, seed: int = SEED
) -> Ratio:
    """Speed ratio of two revisions whose processes ran in turns (A B B A): the n-th of the one beside the n-th of the
    other.

    Each array holds one process's round times in seconds. A pair of processes gives one log-ratio of medians, so that
    what both of them suffered cancels; the centre over pairs is Hodges-Lehmann's. The bootstrap is hierarchical: pairs
    are drawn, and rounds inside both processes of a pair (A. Davison, D. Hinkley, "Bootstrap methods and their
    application", 1997, section 3.8; T. Kalibera, R. Jones, ISMM 2013, for processes as the unit).

    Raises:
        ValueError: no pair, or sides of different length.
    """
    if len(baseline) != len(candidate) or not baseline:
        raise ValueError(f"processes are compared in pairs: got {len(baseline)} and {len(candidate)}")
    pairs = len(baseline)
    centre = float(hodges_lehmann(pair_log_ratios(baseline, candidate)))
    if pairs < 2:
        return Ratio(math.exp(centre), None, "process", pairs)
    rng = np.random.default_rng(seed)
    inner = np.log(_round_replicates(baseline, rng, resamples)) - np.log(_round_replicates(candidate, rng, resamples))
    chosen = rng.integers(pairs, size=(pairs, resamples))
    replicates = hodges_lehmann(np.take_along_axis(inner, chosen, axis=0).T)
    low, high = percentile_interval(replicates, pairs)
    return Ratio(math.exp(centre), (math.exp(low), math.exp(high)), "process", pairs)


def pair_log_ratios(baseline: tuple[Array, ...], candidate: tuple[Array, ...]) -> Array:
    """(pairs,) log speed ratios, one a pair of processes: median round time of the baseline over the candidate's."""
    slow, fast = (np.array([np.median(one) for one in side]) for side in (baseline, candidate))
    ratios: Array = np.log(slow) - np.log(fast)
    return ratios


def _round_replicates(side: tuple[Array, ...], rng: np.random.Generator, resamples: int) -> Array:
    """(processes, resamples) medians of rounds drawn with replacement inside each process."""
    return np.stack([np.median(one[rng.integers(len(one), size=(resamples, len(one)))], axis=1) for one in side])


def group_ratio(log_ratios: Array, resamples: int = RESAMPLES, seed: int = SEED) -> Ratio:
    """Geometric mean of the speed ratios of several cells, as of one model and recipe.

    Args:
        log_ratios: (pairs, cells) log speed ratios. One pair of processes gives a row: it measured all these cells, so
            their errors go together and the row is resampled as a whole.

    Raises:
        ValueError: no pairs or no cells.
    """
    if log_ratios.ndim != 2 or not log_ratios.size:
        raise ValueError(f"need (pairs, cells) log ratios, got shape {log_ratios.shape}")
    pairs = len(log_ratios)
    centre = float(hodges_lehmann(log_ratios.T).mean())
    if pairs < 2:
        return Ratio(math.exp(centre), None, "process", pairs)
    chosen = np.random.default_rng(seed).integers(pairs, size=(resamples, pairs))
    replicates = np.stack([hodges_lehmann(column[chosen]) for column in log_ratios.T]).mean(axis=0)
    low, high = percentile_interval(replicates, pairs)
    return Ratio(math.exp(centre), (math.exp(low), math.exp(high)), "process", pairs)


def sign_flip(log_ratios: Array, shift: float = 0.0, draws: int = 20_000, seed: int = SEED) -> float:
    """One-sided p-value against "the candidate is at most ``shift`` (a log-ratio, at least 0) slower".

    If it is exactly so, the log-ratios of pairs lie symmetrically around ``-shift``, and each of them could as well
    have had the other sign: their sum is held against the sums under all sign patterns (R. Fisher, "The design of
    experiments", 1935, section 21), all of them up to 14 pairs and random ones beyond. No p-value is below one over
    the number of patterns, so few pairs cannot claim much.
    """
    excess = -(np.asarray(log_ratios, dtype=np.float64) + shift)
    if not len(excess):
        raise ValueError("need at least one pair")
    if len(excess) <= 14:
        bits = np.arange(2 ** len(excess))[:, None] >> np.arange(len(excess)) & 1
        sums = (1.0 - 2.0 * bits) @ excess
        return float(np.mean(sums >= excess.sum() - 1e-12))
    signs = np.random.default_rng(seed).choice((-1.0, 1.0), size=(draws, len(excess)))
    return float((1 + np.sum(signs @ excess >= excess.sum() - 1e-12)) / (draws + 1))


def benjamini_hochberg(p_values: Array) -> Array:
    """Adjusted p-values (m,): calling those at most q makes at most a fraction q of the calls false, on average.

    Holds for independent and for positively dependent tests, as cells of one host are (Y. Benjamini, Y. Hochberg,
    JRSS B 57, 1995; Y. Benjamini, D. Yekutieli, Annals of Statistics 29, 2001).
    """
    values = np.asarray(p_values, dtype=np.float64)
    if not np.all((values >= 0) & (values <= 1)):
        raise ValueError("p-values must lie between 0 and 1")
    order = np.argsort(-values, kind="stable")
    ranks = np.arange(len(values), 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum.accumulate(np.minimum(values[order] * len(values) / ranks, 1.0))
    return adjusted


# --- noise ------------------------------------------------------------------------------------------------------------

#: A normal distribution's standard deviation over its median absolute deviation.
_MAD_TO_SIGMA = 1.4826


def split_half_floor(times_s: Array, splits: int = 500, level: float = 0.95, seed: int = SEED) -> float:
    """The change that noise alone makes, as a fraction of the speed, from processes that measured the same thing.

    ``times_s`` (processes,) are median times. They are split at random into halves ``splits`` times; nothing differs
    between halves, so the ``level`` quantile of how far apart they come out is what a comparison of as many processes
    a side cannot see below.

    Raises:
        ValueError: fewer than four processes.
    """
    if len(times_s) < 4:
        raise ValueError(f"splitting into halves needs at least four processes, not {len(times_s)}")
    logs, half = np.log(np.asarray(times_s, dtype=np.float64)), len(times_s) // 2
    order = np.random.default_rng(seed).permuted(np.tile(logs, (splits, 1)), axis=1)
    apart = hodges_lehmann(order[:, :half]) - hodges_lehmann(order[:, half : 2 * half])
    return float(-np.expm1(-np.quantile(np.abs(apart), level)))


def robust_sigma(logs: Array, middle: Callable[[Array], Array] | None = None) -> Array:
    """Spread of series of log values (..., runs) from run to run, without what steps and wild nights add to it.

    The larger of two robust estimates: from differences of neighbours, which a level shift touches only once, and
    around the median, which also sees noise that is alike from night to night. Zero for fewer than three runs.
    ``middle`` is the median to use: :func:`ragged_median` where rows end in NaN.
    """
    if logs.shape[-1] < 3:
        return np.zeros(logs.shape[:-1])
    middle = middle or median
    of_steps = _spread(np.diff(logs, axis=-1), middle) / math.sqrt(2)
    return np.maximum(of_steps, _spread(logs, middle))


def _spread(values: Array, middle: Callable[[Array], Array]) -> Array:
    """Median absolute deviation along the last axis, scaled to a normal distribution's standard deviation."""
    centre = middle(values)[..., None]
    scaled: Array = _MAD_TO_SIGMA * middle(np.abs(values - centre))
    return scaled


def median(values: Array) -> Array:
    """Median along the last axis of values without NaN: NumPy's, several times faster on many short rows."""
    size = values.shape[-1]
    low, high = (size - 1) // 2, size // 2
    parted = np.partition(values, (low, high), axis=-1)
    middle: Array = (parted[..., low] + parted[..., high]) / 2
    return middle


def ragged_median(values: Array) -> Array:
    """(rows,) medians of rows (rows, n) of different length, each filled up with NaN; none may be all NaN."""
    ordered, rows = np.sort(values, axis=-1), np.arange(len(values))  # NaN sorts last
    count = (~np.isnan(values)).sum(axis=-1)
    middle: Array = (ordered[rows, (count - 1) // 2] + ordered[rows, count // 2]) / 2
    return middle
