"""Statistics: known answers, coverage and the refusal to make up numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness import stats
from harness.records import Round, Timing


def timing(*medians_s: float, process: int = 1, spread: float = 0.01) -> Timing:
    """A timing with one round for each median, of three iterations around it."""
    return Timing(
        rounds=tuple(
            Round(float(index), process, (median * (1 - spread), median, median * (1 + spread)))
            for index, median in enumerate(medians_s)
        )
    )


def test_speedup_is_the_ratio_of_times() -> None:
    result = stats.speedup(timing(0.4, 0.4, 0.4), timing(0.1, 0.1, 0.1))
    assert result is not None
    assert result.value == pytest.approx(4.0)
    assert result.ci95 == pytest.approx((4.0, 4.0))


def test_pairing_cancels_a_drift_of_the_machine() -> None:
    drift = (1.0, 1.3, 1.7, 2.2, 3.0)
    result = stats.speedup(timing(*(0.4 * d for d in drift)), timing(*(0.2 * d for d in drift)))
    assert result is not None and result.ci95 is not None
    assert result.value == pytest.approx(2.0)
    assert result.ci95 == pytest.approx((2.0, 2.0))


def test_one_disturbed_round_does_not_move_the_speedup() -> None:
    result = stats.speedup(timing(0.4, 0.4, 0.4, 0.4, 0.4), timing(0.1, 0.1, 0.9, 0.1, 0.1))
    assert result is not None and result.ci95 is not None
    assert result.value == pytest.approx(4.0)
    assert result.ci95[0] < 1.0, "but the interval shows it"


def test_rounds_without_a_partner_are_left_out() -> None:
    result = stats.speedup(timing(0.4, 0.4, 9.0, 9.0, 9.0), timing(0.2, 0.2))
    assert result is not None
    assert result.value == pytest.approx(2.0)


def test_one_round_has_no_interval() -> None:
    result = stats.speedup(timing(0.4), timing(0.2))
    assert result is not None
    assert result.value == pytest.approx(2.0)
    assert result.ci95 is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -0.1])
def test_a_time_that_is_not_a_positive_number_gives_no_speedup(bad: float) -> None:
    broken = Timing(rounds=(Round(0.0, 1, (0.1, bad)), Round(1.0, 1, (0.1, 0.1))))
    assert stats.speedup(timing(0.4, 0.4), broken) is None
    assert stats.speedup(broken, timing(0.4, 0.4)) is None
    assert stats.median_time_s(broken) is None


@pytest.mark.parametrize("empty", [Timing(), Timing(rounds=(Round(0.0, 1, ()),))])
def test_what_was_not_measured_gives_no_speedup(empty: Timing) -> None:
    assert stats.speedup(timing(0.4), empty) is None
    assert stats.median_time_s(empty) is None


def test_same_data_same_interval() -> None:
    rng = np.random.default_rng(1)
    slow, fast = rng.normal(0.4, 0.02, 9), rng.normal(0.1, 0.01, 9)
    assert stats.speedup(timing(*slow), timing(*fast)) == stats.speedup(timing(*slow), timing(*fast))


@pytest.mark.parametrize("rounds", [5, 8, 20])
def test_the_interval_covers_the_truth_about_as_often_as_it_says(rounds: int) -> None:
    rng = np.random.default_rng(rounds)
    tries, covered = 150, 0
    for _ in range(tries):
        slow, fast = (timing(*np.exp(rng.standard_t(4, rounds) * 0.02)) for _ in range(2))
        result = stats.speedup(slow, fast)
        assert result is not None and result.ci95 is not None
        covered += result.ci95[0] <= 1.0 <= result.ci95[1]
    assert covered / tries >= 0.88
