"""Timing: steady state, percentiles, slices. Clocks are played, so nothing here depends on the machine's speed."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator

import pytest

from harness import timing


class Played:
    """A call whose iterations take the given times (the last one for ever) on a clock that only it moves."""

    def __init__(self, times_s: list[float]) -> None:
        self.times_s = times_s
        self.calls = 0
        self.now_ns = 1_000_000_000

    def __call__(self) -> None:
        self.now_ns += round(self.times_s[min(self.calls, len(self.times_s) - 1)] * 1e9)
        self.calls += 1

    def clock(self) -> int:
        return self.now_ns


def noisy(centre: float, count: int, spread: float = 0.01) -> list[float]:
    rng = random.Random(7)
    return [centre * (1 + rng.uniform(-spread, spread)) for _ in range(count)]


def test_the_steady_state_starts_after_the_slow_beginning() -> None:
    samples = [9.0, 5.0, 3.0, 2.0, 1.5, *noisy(1.0, 20)]
    start = timing.steady_start(samples)
    assert start is not None
    assert 3 <= start <= 5  # a window's median forgives two slow samples in it


def test_a_steady_series_is_steady_from_the_start_despite_single_interruptions() -> None:
    samples = noisy(1.0, 30)
    samples[7], samples[19] = 30.0, 12.0
    assert timing.steady_start(samples) == 0


def test_a_slow_drift_is_not_steady() -> None:
    samples = [1.0 - 0.004 * i for i in range(100)]  # neighbouring windows differ by 2 %
    start = timing.steady_start(samples[:60])
    assert start is None or start > 30


@pytest.mark.parametrize("samples", [[], [1.0], noisy(1.0, 9)])
def test_too_few_samples_show_no_steady_state(samples: list[float]) -> None:
    assert timing.steady_start(samples) is None


def test_a_window_has_at_least_one_sample() -> None:
    with pytest.raises(ValueError, match="at least one"):
        timing.steady_start([1.0], window=0)


def test_percentiles_interpolate_between_order_statistics() -> None:
    samples = [4.0, 1.0, 3.0, 2.0]
    assert timing.percentile(samples, 0) == 1.0
    assert timing.percentile(samples, 50) == 2.5
    assert timing.percentile(samples, 90) == pytest.approx(3.7)
    assert timing.percentile(samples, 100) == 4.0
    assert timing.percentile([5.0], 99) == 5.0
    with pytest.raises(ValueError, match="at least one"):
        timing.percentile([], 50)


def test_latency_and_throughput_follow_from_samples() -> None:
    samples = [0.1] * 98 + [0.5, 0.5]
    found = timing.latency(samples)
    assert (found.p50, found.p90) == (0.1, 0.1)
    assert found.p99 == pytest.approx(0.5)
    assert timing.throughput(samples, sequences=8) == pytest.approx(80.0)


def test_warm_up_ends_when_steady() -> None:
    call = Played([2.0, 1.0, 0.5, *[0.1]])
    found = timing.warm_up(call, cap_s=1000, clock_ns=call.clock)
    assert found.steady
    assert found.iterations == call.calls
    assert 10 <= call.calls < 20
    assert found.seconds == pytest.approx(3.5 + 0.1 * (call.calls - 3))


def test_warm_up_that_never_settles_ends_at_the_cap_and_says_so() -> None:
    call = Played([1.0 * 0.8**i for i in range(200)])
    found = timing.warm_up(call, cap_s=4.0, clock_ns=call.clock)
    assert not found.steady
    assert 4.0 <= found.seconds < 5.0


def test_a_slice_ends_by_time_and_leaves_out_what_settles() -> None:
    call = Played([5.0, 4.0, *[0.25]])
    found = timing.time_slice(call, 2.0, 3, 1000, settle=2, clock_ns=call.clock, wall_clock=lambda: 1234.5)
    assert found.t0 == 1234.5
    assert found.samples_s == (0.25,) * 8


def test_a_slice_keeps_its_least_and_its_most_iterations() -> None:
    slow, fast = Played([10.0]), Played([0.001])
    assert len(timing.time_slice(slow, 1.0, 3, 10, clock_ns=slow.clock).samples_s) == 3
    assert len(timing.time_slice(fast, 1.0, 3, 10, clock_ns=fast.clock).samples_s) == 10


@pytest.fixture
def gc_state() -> Iterator[Callable[[bool], None]]:
    before = gc.isenabled()
    yield lambda on: gc.enable() if on else gc.disable()
    if before:
        gc.enable()
    else:
        gc.disable()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_during_a_slice_and_is_as_before_after(
    enabled: bool, gc_state: Callable[[bool], None]
) -> None:
    seen = []
    gc_state(enabled)
    timing.time_slice(lambda: seen.append(gc.isenabled()), 0.0, 2, 2)
    assert seen == [False] * 4
    assert gc.isenabled() is enabled


def test_the_collector_returns_after_a_failing_iteration(gc_state: Callable[[bool], None]) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    gc_state(True)
    with pytest.raises(RuntimeError):
        timing.time_slice(fail, 0.0, 1, 1)
    assert gc.isenabled()
