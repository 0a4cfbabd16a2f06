"""Statistics: known answers, coverage and the refusal to make up numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

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


# --- paired predictions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (0, 9), (10, 10), (3, 17), (40, 38), (200, 260)])
def test_mcnemar_is_the_exact_binomial_test(gained: int, lost: int) -> None:
    expected = scipy_stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert stats.mcnemar(gained, lost) == pytest.approx(expected)
    assert stats.mcnemar(lost, gained) == pytest.approx(expected)


def test_mcnemar_refuses_negative_counts() -> None:
    with pytest.raises(ValueError, match="negative"):
        stats.mcnemar(-1, 3)


def test_paired_difference_is_the_bootstrap_over_examples() -> None:
    rng = np.random.default_rng(3)
    reference = (rng.random(800) < 0.75).astype(float)
    scores = np.where(rng.random(800) < 0.05, 1 - reference, reference)
    value, (low, high) = stats.paired_difference(scores, reference)
    assert value == pytest.approx(scores.mean() - reference.mean())
    draws = rng.integers(800, size=(4000, 800))
    direct = np.quantile((scores - reference)[draws].mean(axis=1), (0.025, 0.975))
    assert (low, high) == pytest.approx(tuple(direct), abs=0.002)


def test_paired_difference_is_sharper_than_two_unpaired_models() -> None:
    rng = np.random.default_rng(4)
    reference = (rng.random(1000) < 0.7).astype(float)
    scores = reference.copy()
    scores[:10] = 1 - scores[:10]
    _, (low, high) = stats.paired_difference(scores, reference)
    assert high - low < 0.5 * 4 * math.sqrt(2 * 0.7 * 0.3 / 1000)


def test_equal_predictions_differ_by_exactly_nothing() -> None:
    scores = np.array([1.0, 0.0, 1.0])
    assert stats.paired_difference(scores, scores) == (0.0, (0.0, 0.0))


@pytest.mark.parametrize(
    ("scores", "reference"), [([1.0], [1.0, 0.0]), ([], []), ([math.nan], [1.0]), ([[1.0]], [[1.0]])]
)
def test_paired_difference_refuses_what_is_not_paired(scores: list[float], reference: list[float]) -> None:
    with pytest.raises(ValueError, match="paired"):
        stats.paired_difference(np.array(scores), np.array(reference))


# --- processes --------------------------------------------------------------------------------------------------------


def test_hodges_lehmann_known_values() -> None:
    assert stats.hodges_lehmann(np.array([1.0, 2.0, 9.0])) == pytest.approx(3.5), "1, 1.5, 2 | 5, 5.5, 9"
    assert stats.hodges_lehmann(np.array([1.0, 2.0, 3.0, 4.0, 1000.0])) < 5
    assert stats.hodges_lehmann(np.array([[1.0, 3.0], [5.0, 5.0]])) == pytest.approx([2.0, 5.0])


def processes_of(rng: np.random.Generator, pairs: int, slower: float = 1.0) -> tuple[tuple[np.ndarray, ...], ...]:
    """A and B in turns: what a pair shares (drift), what a process has (2 %), what a round has (1 %, heavy-tailed)."""
    drift = np.cumsum(rng.normal(0, 0.03, pairs))

    def side(factor: float) -> tuple[np.ndarray, ...]:
        own = drift + rng.normal(0, 0.02, pairs)
        return tuple(factor * np.exp(one + 0.01 * rng.standard_t(3, 8)) for one in own)

    return side(1.0), side(slower)


def test_process_ratio_sees_8_percent_with_12_pairs_and_covers_no_change() -> None:
    rng = np.random.default_rng(0)
    tries, seen, covered = 40, 0, 0
    for _ in range(tries):
        slower = stats.process_ratio(*processes_of(rng, 12, 1.08), resamples=1000).interval
        same = stats.process_ratio(*processes_of(rng, 12), resamples=1000).interval
        assert slower is not None and same is not None
        seen += slower[1] < 1.0
        covered += same[0] <= 1.0 <= same[1]
    assert seen >= 0.95 * tries
    assert covered >= 0.88 * tries


def test_more_rounds_in_few_processes_do_not_make_it_surer() -> None:
    """Rounds are nested in processes: 100 rounds of each of 4 processes know no more of the 5th process than 5 do."""
    rng = np.random.default_rng(2)
    own = rng.normal(0, 0.05, (2, 4))

    def width(rounds: int) -> float:
        sides = [tuple(np.exp(one + 0.001 * rng.normal(size=rounds)) for one in side) for side in own]
        interval = stats.process_ratio(sides[0], sides[1]).interval
        assert interval is not None
        return interval[1] - interval[0]

    assert width(100) > 0.8 * width(5)


def test_process_ratio_of_one_pair_has_no_interval_and_needs_pairs() -> None:
    one = (np.array([0.1, 0.1]),)
    assert stats.process_ratio(one, (np.array([0.2]),)) == stats.Ratio(pytest.approx(0.5), None, "process", 1)
    for baseline, candidate in (((), ()), (one, one + one)):
        with pytest.raises(ValueError, match="pairs"):
            stats.process_ratio(baseline, candidate)


def test_group_ratio_is_the_geometric_mean_and_knows_that_cells_share_their_process() -> None:
    rng = np.random.default_rng(5)
    shared = rng.normal(0, 0.05, (10, 1))
    together = stats.group_ratio(np.log([0.8, 1.25]) + np.tile(shared, (1, 2)))
    apart = stats.group_ratio(np.log([0.8, 1.25]) + np.hstack([shared, rng.permutation(-shared)]))
    assert together.value == pytest.approx(math.exp(stats.hodges_lehmann(shared[:, 0])))
    assert together.interval is not None and apart.interval is not None
    assert together.interval[1] - together.interval[0] > 1.2 * (apart.interval[1] - apart.interval[0])
    assert stats.group_ratio(np.log([[0.5, 2.0]])).interval is None
    with pytest.raises(ValueError, match="pairs, cells"):
        stats.group_ratio(np.zeros(3))


def test_sign_flip_counts_patterns() -> None:
    assert stats.sign_flip(np.full(5, -0.1)) == pytest.approx(1 / 32)
    assert stats.sign_flip(np.full(5, 0.1)) == 1.0
    assert stats.sign_flip(np.array([-0.1, 0.1])) == pytest.approx(3 / 4)
    assert stats.sign_flip(np.full(8, -0.04), shift=0.05) == 1.0, "slower, but within the margin"
    assert stats.sign_flip(np.full(20, -0.1)) < 1e-4
    with pytest.raises(ValueError, match="pair"):
        stats.sign_flip(np.array([]))


@pytest.mark.parametrize("pairs", [8, 18])
def test_sign_flip_alarms_as_often_as_it_says(pairs: int) -> None:
    rng = np.random.default_rng(pairs)
    found = [stats.sign_flip(0.02 * rng.standard_t(3, pairs), draws=2000) for _ in range(300)]
    assert 0.02 <= np.mean(np.array(found) <= 0.05) <= 0.09


def test_benjamini_hochberg_is_scipys() -> None:
    rng = np.random.default_rng(6)
    values = np.concatenate([rng.random(40), rng.random(10) * 0.001, [0.0, 1.0, 0.5, 0.5]])
    assert stats.benjamini_hochberg(values) == pytest.approx(scipy_stats.false_discovery_control(values))
    assert stats.benjamini_hochberg(np.array([])).shape == (0,)
    with pytest.raises(ValueError, match="between 0 and 1"):
        stats.benjamini_hochberg(np.array([0.1, math.nan]))


# --- noise ------------------------------------------------------------------------------------------------------------


def test_split_half_floor_is_what_fresh_comparisons_stay_below() -> None:
    rng = np.random.default_rng(7)
    floors = [stats.split_half_floor(np.exp(rng.normal(0, 0.02, 20))) for _ in range(10)]
    fresh = np.abs(
        stats.hodges_lehmann(rng.normal(0, 0.02, (2000, 10))) - stats.hodges_lehmann(rng.normal(0, 0.02, (2000, 10)))
    )
    below = [np.mean(fresh < -math.log1p(-floor)) for floor in floors]
    assert 0.88 < np.mean(below) < 0.98
    with pytest.raises(ValueError, match="four"):
        stats.split_half_floor(np.ones(3))


def test_robust_sigma_ignores_wild_nights() -> None:
    rng = np.random.default_rng(8)
    logs = rng.normal(0, 0.01, 200)
    plain = stats.robust_sigma(logs)
    assert plain == pytest.approx(0.01, rel=0.2)
    wild = logs.copy()
    wild[::25] += 0.5
    assert stats.robust_sigma(wild) == pytest.approx(plain, rel=0.2)
    assert stats.robust_sigma(logs[:2]) == 0.0


def test_medians_of_rows() -> None:
    rng = np.random.default_rng(1)
    for size in (1, 2, 7, 60):
        values = rng.normal(size=(5, size))
        assert stats.median(values) == pytest.approx(np.median(values, axis=1))
    ragged = rng.normal(size=(6, 9))
    for row in range(6):
        ragged[row, row + 3 :] = np.nan
    assert stats.ragged_median(ragged) == pytest.approx(np.nanmedian(ragged, axis=1))
    whole = [stats.robust_sigma(ragged[row, : row + 3]) for row in range(6)]
    assert stats.robust_sigma(ragged, stats.ragged_median) == pytest.approx(whole)
