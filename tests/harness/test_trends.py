"""What a history says of its newest run: steps, drift, gains, acceptance, many cells at once."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from harness import trends
from harness.trends import Accepted, Trend


def quiet(runs: int, sigma: float = 0.01, seed: int = 0) -> np.ndarray:
    """Costs around 1 with heavy-tailed noise of standard deviation ``sigma``."""
    return np.exp(np.random.default_rng(seed).standard_t(3, runs) * sigma / math.sqrt(3))


def judged(costs: np.ndarray, **said: object) -> Trend:
    found = trends.judge(costs.tolist(), Accepted(**said))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_a_quiet_series_has_a_level_and_no_alarm() -> None:
    found = judged(quiet(200))
    assert found.change is None and found.drift is None and not found.sudden
    assert found.level == pytest.approx(1.0, abs=0.005) and found.runs == 60 and found.first == 139
    assert found.noise == pytest.approx(0.0065, rel=0.3), (
        "the robust deviation of such noise is two thirds of the plain"
    )


@pytest.mark.parametrize("runs", [0, 1, 9, 10])
def test_a_short_history_says_nothing(runs: int) -> None:
    assert trends.judge(quiet(runs).tolist()) is None
    assert trends.judge(quiet(11).tolist()) is not None


def test_a_run_that_was_not_measured_is_not_judged() -> None:
    assert trends.judge([*quiet(50).tolist(), None]) is None
    assert trends.judge([*quiet(50).tolist(), math.nan]) is None
    assert trends.judge([*quiet(50).tolist(), 0.0]) is None
    gaps = quiet(60)
    gaps[::3] = math.nan
    gaps[-1] = 1.0
    assert trends.judge(gaps.tolist()) is not None


def test_a_wild_night_is_said_and_decides_nothing() -> None:
    costs = quiet(100)
    costs[-1] = 1.3
    found = judged(costs)
    assert found.strays and found.change is None and not found.sudden


def test_one_night_decides_alone_only_if_it_is_half_as_slow_again() -> None:
    costs = quiet(100)
    costs[-1] = 1.6
    assert judged(costs).sudden
    costs[-1] = 0.5
    assert not judged(costs).sudden, "faster is never a failure"


def test_a_step_is_alarmed_on_the_third_night_and_every_night_after() -> None:
    costs = quiet(160)
    costs[100:] *= 1.08
    found = [trends.judge(costs[: night + 1].tolist()) for night in range(99, 160)]
    alarmed = [one is not None and one.change is not None for one in found]
    assert alarmed == [False, False, False] + [True] * 58
    last = found[-1]
    assert last is not None and last.change is not None
    assert last.change.size == pytest.approx(0.08, abs=0.02) and last.level == pytest.approx(1, abs=0.01)
    assert last.p_value < 1e-20 < found[3].p_value < 1e-3  # type: ignore[union-attr]


def test_sweeping_a_history_says_what_each_night_said() -> None:
    for seed, (step, said) in enumerate(
        [
            (1.0, Accepted()),
            (1.08, Accepted()),
            (1.08, Accepted(runs=(62,))),
            (1.08, Accepted(runs=(70,), pinned=10)),
            (1.08, Accepted(known=(60,))),
            (0.92, Accepted()),
            (0.92, Accepted(runs=(61,))),
        ]
    ):
        costs = quiet(130, seed=seed)
        costs[60:] *= step
        costs[100:] *= 1.06
        swept = trends.sweep(costs.tolist(), said)
        assert swept == [trends.judge(costs[: night + 1].tolist(), said) for night in range(130)]


# --- what people said -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [{"runs": (100,)}, {"runs": (101,)}, {"runs": (110,)}, {"known": (100,)}])
def test_an_accepted_step_is_a_new_level(said: dict[str, tuple[int, ...]]) -> None:
    costs = quiet(160)
    costs[100:] *= 1.08
    found = judged(costs, **said)
    assert found.change is None and found.level == pytest.approx(1.08, abs=0.01)
    assert found.begins == next(iter(said.values()))[0]


def test_accepting_where_nothing_changed_changes_nothing() -> None:
    costs = quiet(160)
    assert judged(costs, runs=(80, 120, 159)) == judged(costs)
    costs[100:] *= 1.08
    assert judged(costs, runs=(50, 98)) == judged(costs), "a run before the step explains no step"


def test_a_gain_is_reported_and_then_kept_so_that_losing_it_is_a_loss() -> None:
    costs = quiet(200)
    costs[100:140] *= 0.92
    sizes = [None if one is None or one.change is None else one.change.size for one in trends.sweep(costs.tolist())]
    assert all(size is not None and size < 0 for size in sizes[102:112])
    assert sizes[115:139] == [None] * 24, "after ten more runs it is the level"
    assert all(size is not None and size > 0.06 for size in sizes[143:])


# --- drift ------------------------------------------------------------------------------------------------------------


def creeping(runs: int, a_week: float = 0.001) -> np.ndarray:
    return quiet(runs) * (1 + a_week / 7 * np.arange(runs))


def test_slow_drift_is_found_before_two_percent() -> None:
    costs = creeping(200)
    found = trends.sweep(costs.tolist())
    night = next(night for night, one in enumerate(found) if one is not None and one.drift is not None)
    assert night / 7 * 0.001 < 0.02
    assert all(one is None or one.change is None for one in found[: night + 1]), "no step gave it away"


def test_accepting_runs_again_and_again_does_not_hide_drift_and_pinning_does() -> None:
    costs = creeping(200)
    monthly = tuple(range(20, 200, 30))
    assert judged(costs, runs=monthly, pinned=0).drift == pytest.approx(0.026, abs=0.006)
    assert judged(costs, pinned=199).drift is None


def test_accepted_steps_are_no_part_of_the_drift() -> None:
    costs = quiet(260)
    costs[100:] *= 1.10
    costs[160:] *= 0.9
    assert judged(costs, runs=(102,), pinned=30).drift is None
    assert judged(costs, known=(100, 160), pinned=30).drift is None
    both = creeping(260)
    both[100:] *= 1.10
    assert judged(both, known=(100,), pinned=30).drift == pytest.approx(0.029, abs=0.012)


def test_a_standing_step_is_not_called_drift_as_well() -> None:
    costs = quiet(200)
    costs[120:] *= 1.05
    found = judged(costs)
    assert found.change is not None and found.drift is None


# --- groups and many cells --------------------------------------------------------------------------------------------


def test_the_geometric_mean_sees_what_no_cell_can_claim() -> None:
    cells = [quiet(120, sigma=0.02, seed=seed) for seed in range(8)]
    for one in cells:
        one[100:106] *= 1.03
    alone = [trends.judge(one[:104].tolist()) for one in cells]
    together = trends.judge(trends.geomean([one[:104] for one in cells]).tolist())
    assert sum(one is not None and one.change is not None for one in alone) <= 2
    assert together is not None and together.change is not None
    assert together.change.size == pytest.approx(0.03, abs=0.01)


def test_a_missing_cell_moves_no_geometric_mean() -> None:
    cells = [np.full(20, cost) for cost in (0.001, 0.1, 1.0, 10.0, 100.0, 1000.0)]
    cells[0][7] = math.nan
    cells[5][9] = -1.0
    assert trends.geomean(cells) == pytest.approx(np.ones(20))
    for one in cells[:3]:
        one[11] = math.nan
    assert math.isnan(trends.geomean(cells)[11]), "half of the cells are not the group"
    assert np.isnan(trends.geomean([np.full(5, math.nan)])).all()


def test_many_cells_hold_back_a_lone_alarm_and_not_many() -> None:
    costs = quiet(103)
    costs[100:] *= 1.05
    alarm = judged(costs)
    calm = dataclasses.replace(alarm, change=None, p_value=1.0)
    assert 1e-5 < alarm.p_value < 1e-3
    assert trends.real([alarm] + [calm] * 100)[0]
    assert not trends.real([alarm] + [calm] * 5000)[0], "one in five thousand is what chance gives"
    assert all(trends.real([alarm] * 100 + [calm] * 5000)[:100]), "a hundred of them are not"
    assert trends.real([]) == []
