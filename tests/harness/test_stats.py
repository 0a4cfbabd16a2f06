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


def test_speed_ratio_below_one_is_slower() -> None:
    ratio = stats.speed_ratio(timing(0.08, 0.08, 0.08), timing(0.1, 0.1, 0.1))
    assert ratio is not None
    assert ratio.value == pytest.approx(0.8)
    assert (ratio.unit, ratio.units) == ("round", 3)


def test_speed_ratio_takes_the_process_as_unit_where_both_sides_have_several() -> None:
    """Two processes that disagree by 20 %, each very sure of itself: the interval must know of the 20 %."""
    sides = Timing(rounds=timing(*[0.1] * 6).rounds + timing(*[0.12] * 6, process=2).rounds)
    pooled = Timing(rounds=tuple(Round(one.t0, 1, one.samples_s) for one in timing(*[0.1] * 12).rounds))
    by_process, by_round = stats.speed_ratio(sides, sides), stats.speed_ratio(pooled, pooled)
    assert by_process is not None and by_process.interval is not None
    assert by_round is not None and by_round.interval is not None
    assert (by_process.unit, by_process.units, by_round.unit) == ("process", 2, "round")
    assert by_process.interval[1] / by_process.interval[0] > 1.3
    assert by_round.interval == pytest.approx((1.0, 1.0))


def test_speed_ratio_of_one_round_has_no_interval() -> None:
    ratio = stats.speed_ratio(timing(0.1), timing(0.1, 0.1))
    assert ratio is not None and ratio.interval is None and ratio.value == pytest.approx(1.0)


def test_speed_ratio_of_nothing_is_nothing() -> None:
    assert stats.speed_ratio(Timing(), timing(0.1)) is None
    assert stats.speed_ratio(timing(0.1), timing(math.nan)) is None


def test_expanded_level_is_wider_for_few_units_and_plain_for_many() -> None:
    levels = [stats.expanded_level(units) for units in (2, 5, 20, 100_000)]
    assert levels == sorted(levels)
    assert levels[-1] == pytest.approx(0.025, rel=1e-3)
    with pytest.raises(ValueError, match="two units"):
        stats.expanded_level(1)


@pytest.mark.parametrize(
    ("value", "chance", "n", "expected"),
    [
        (0.50, 0.5, 1000, True),
        (0.52, 0.5, 1000, True),
        (0.53, 0.5, 1000, False),
        (0.73, 0.58, 20, True),
        (0, 0, 9, True),
    ],
)
def test_at_chance_depends_on_how_many_examples_there_are(value: float, chance: float, n: int, expected: bool) -> None:
    assert stats.at_chance(value, chance, n) is expected
