"""Timing one callable: warm-up until steady, slices of steady iterations, percentiles. No torch, no quantization.

Steady state is detected, not assumed, after A. Georges, D. Buytaert, L. Eeckhout, "Statistically rigorous Java
performance evaluation" (OOPSLA 2007), section 4.2, who take the first window of iterations whose coefficient of
variation is small. Here medians of windows are compared instead, because single slow iterations (an interrupt, a page
fault) are common on shared machines and say nothing about warm-up. T. Kalibera and R. Jones, "Rigorous benchmarking in
reasonable time" (ISMM 2013), show that some programs never become steady: so there is a cap, and the result says that
it was reached.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from harness.records import Latency

#: Iterations in a window whose medians are compared.
WINDOW = 5
#: Relative difference of medians that still counts as the same speed.
TOLERANCE = 0.05
#: Untimed iterations at the start of a slice: the worker slept while others ran, so its caches are cold.
SETTLE = 2

NANOSECONDS = 1e9


@dataclass(frozen=True)
class WarmUp:
    """Iterations until steady. ``steady`` is False if the cap came first. ``seconds`` covers all of them."""

    iterations: int
    seconds: float
    steady: bool


@dataclass(frozen=True)
class Slice:
    """Timed iterations. ``t0``: Unix time in seconds at the first of them; ``samples_s`` in seconds."""

    t0: float
    samples_s: tuple[float, ...]


def steady_start(samples: Sequence[float], window: int = WINDOW, tolerance: float = TOLERANCE) -> int | None:
    """Index of the first sample of the steady state; None if the samples do not show one.

    It is the first window whose median agrees within ``tolerance`` with the median of the window after it and with that
    of all samples after it: the second test keeps a slow drift, whose neighbouring windows agree, from passing.

    Args:
        samples: times of successive iterations, any unit.
        window: samples in a window.
        tolerance: largest relative difference of medians.
    """
    if window < 1:
        raise ValueError(f"a window needs at least one sample, not {window}")
    for start in range(len(samples) - 2 * window + 1):
        first = statistics.median(samples[start : start + window])
        following = statistics.median(samples[start + window : start + 2 * window])
        rest = statistics.median(samples[start + window :])
        if _agree(first, following, tolerance) and _agree(first, rest, tolerance):
            return start
    return None


def _agree(a: float, b: float, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * min(a, b)


def percentile(samples: Sequence[float], percent: float) -> float:
    """The ``percent`` percentile of ``samples``, interpolated linearly between order statistics (Hyndman and Fan, 1996,
    definition 7)."""
    if not samples:
        raise ValueError("a percentile needs at least one sample")
    ordered = sorted(samples)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def latency(samples: Sequence[float]) -> Latency:
    """Percentiles of ``samples`` (seconds)."""
    return Latency(percentile(samples, 50), percentile(samples, 90), percentile(samples, 99))


def throughput(samples: Sequence[float], sequences: int) -> float:
    """Sequences a second at the median iteration; ``sequences`` is how many one iteration processes."""
    return sequences / percentile(samples, 50)


def warm_up(
    call: Callable[[], object],
    cap_s: float,
    min_iterations: int = 1,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> WarmUp:
    """Call ``call`` until its times are steady, or until ``cap_s`` seconds are over (and ``min_iterations`` done).

    Returns:
        How many iterations it took. Where the cap came first, ``steady`` is False.
    """
    samples: list[float] = []
    begin = clock_ns()
    while True:
        start = clock_ns()
        call()
        end = clock_ns()
        samples.append((end - start) / NANOSECONDS)
        # The tail is enough, and bounds the work of the test on fast models.
        steady = steady_start(samples[-4 * WINDOW :]) is not None
        spent = (end - begin) / NANOSECONDS
        if len(samples) >= min_iterations and (steady or spent >= cap_s):
            return WarmUp(len(samples), spent, steady)


def time_slice(
    call: Callable[[], object],
    seconds: float,
    min_iterations: int,
    max_iterations: int,
    settle: int = SETTLE,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
    wall_clock: Callable[[], float] = time.time,
) -> Slice:
    """Time iterations of ``call`` for about ``seconds``, garbage collection held off.

    Only ``call`` lies between the two clock readings of a sample: inputs are prepared by the caller.

    Args:
        call: one iteration.
        seconds: the slice ends at the first iteration that passes this time.
        min_iterations: iterations timed in any case.
        max_iterations: iterations timed at most.
        settle: untimed iterations before the first timed one; at least one is always worth it after a pause.
    """
    with _no_garbage_collection():
        for _ in range(settle):
            call()
        t0 = wall_clock()
        samples: list[int] = []
        begin = clock_ns()
        while len(samples) < max_iterations:
            start = clock_ns()
            call()
            end = clock_ns()
            samples.append(end - start)
            if len(samples) >= min_iterations and end - begin >= seconds * NANOSECONDS:
                break
    return Slice(t0, tuple(sample / NANOSECONDS for sample in samples))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect once, then keep Python's cycle collector from running inside a timed iteration."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
