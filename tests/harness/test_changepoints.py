"""Steps, drift and levels on series whose changes are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness import changepoints, gate_power
from harness.changepoints import Change, drift, levels, watch


def quiet(runs: int, sigma: float = 0.01, seed: int = 0) -> np.ndarray:
    """Costs around 1 with heavy-tailed noise of standard deviation ``sigma``."""
    return np.exp(np.random.default_rng(seed).standard_t(3, runs) * sigma / math.sqrt(3))


def test_a_step_is_found_within_three_runs_and_stays_open() -> None:
    costs = quiet(120)
    costs[80:] *= 1.08
    (change,) = watch(costs.tolist())
    assert 80 <= change.found <= 82
    assert change.first in (79, 80)
    assert change.size == pytest.approx(0.08, abs=0.02)
    assert change.ended is None


@pytest.mark.parametrize("runs", [100, 400])
def test_an_alarm_lasts_however_long_the_slowdown_does(runs: int) -> None:
    costs = quiet(60 + runs)
    costs[60:] *= 1.1
    assert [change.ended for change in watch(costs.tolist())] == [None]


def test_an_improvement_is_found_too() -> None:
    costs = quiet(120)
    costs[80:] *= 0.9
    (change,) = watch(costs.tolist())
    assert change.size == pytest.approx(-0.1, abs=0.02)


def test_a_change_that_goes_away_ends_the_alarm_and_does_not_alarm_again() -> None:
    costs = quiet(200)
    costs[80:140] *= 1.1
    (change,) = watch(costs.tolist())
    assert change.ended is not None and 141 <= change.ended <= 143
    again = costs.copy()
    again[170:] *= 1.1
    first, second = watch(again.tolist())
    assert first == change and 170 <= second.found <= 172 and second.ended is None


def test_an_accepted_change_is_the_new_level() -> None:
    costs = quiet(200)
    costs[80:] *= 1.1
    costs[150:] *= 1.1
    assert [change.found in (82, 81, 80) for change in watch(costs.tolist())] == [True], "one alarm that lasts"
    (change,) = watch(costs.tolist(), accepted=[80])
    assert 150 <= change.found <= 152 and change.size == pytest.approx(0.1, abs=0.02) and change.ended is None
    assert watch(costs.tolist(), accepted=[80, 150]) == []
    (closed,) = watch(costs.tolist(), accepted=[100, 150])
    assert 80 <= closed.found <= 82 and closed.ended == 100


@pytest.mark.parametrize("wild", [[100], [100, 101], [100, 102, 140, 141]])
def test_wild_nights_do_not_alarm(wild: list[int]) -> None:
    costs = quiet(160)
    costs[wild] *= 1.5
    assert watch(costs.tolist()) == []


def test_three_percent_takes_longer_than_three_runs_and_is_found() -> None:
    delays = []
    for seed in range(15):
        costs = quiet(120, seed=seed)
        costs[90:] *= 1.03
        delays += [change.found - 89 for change in watch(costs.tolist()) if change.found >= 90]
    assert len(delays) >= 14
    assert max(delays) > 3
    assert np.quantile(delays, 0.9) <= 10


def test_a_quiet_series_is_not_alarmed_below_the_smallest_change() -> None:
    costs = np.ones(100)
    costs[50:] *= 1.009
    assert watch(costs.tolist()) == []
    costs[50:] *= 1.009
    assert [change.found for change in watch(costs.tolist())] == [52]


def test_a_noisy_series_asks_for_more() -> None:
    costs = quiet(120, sigma=0.05)
    costs[90:] *= 1.05
    assert watch(costs.tolist()) == []


def test_short_series_and_missing_runs() -> None:
    assert watch([]) == []
    assert watch([1.0, 2.0, 2.0, 2.0]) == []
    costs: list[float | None] = quiet(120).tolist()
    costs[80:] = [cost * 1.1 for cost in costs[80:] if cost is not None]
    holes = costs.copy()
    for place in (20, 40, 60, 81, 83):
        holes[place] = None
    holes[30], holes[50] = math.nan, 0.0
    (change,) = watch(holes)
    assert isinstance(change, Change)
    assert holes[change.found] is not None and 80 <= change.found <= 86, "positions count missing runs"


def test_the_answer_does_not_depend_on_what_comes_later() -> None:
    costs = quiet(150)
    costs[80:] *= 1.06
    (whole,) = watch(costs.tolist())
    (then,) = watch(costs[: whole.found + 1].tolist())
    assert then == whole
    assert watch(costs[: whole.found].tolist()) == []


def test_drift_is_found_against_the_pinned_release_where_no_step_is() -> None:
    costs = quiet(60 + 7 * 20)
    costs[60:] *= 1 + np.arange(140) * 0.001 / 7
    found = drift(costs.tolist(), costs[:60].tolist())
    assert found is not None and found == pytest.approx(0.018, abs=0.004)
    assert drift(quiet(200).tolist(), quiet(60, seed=1).tolist()) is None


def test_drift_needs_runs_on_both_sides() -> None:
    assert drift([2.0] * 9, [1.0] * 60) is None
    assert drift([2.0] * 60, [1.0] * 9) is None
    assert drift([2.0] * 10, [1.0] * 10) == pytest.approx(1.0)


def test_levels_of_a_history() -> None:
    costs = quiet(300)
    costs[100:] *= 1.05
    costs[200:] *= 0.9
    costs[[50, 150]] *= 1.4
    found = levels(costs.tolist())
    assert [level.first for level in found] == pytest.approx([0, 100, 200], abs=1)
    assert [level.value for level in found] == pytest.approx([1.0, 1.05, 0.945], rel=0.01)
    assert all(level.confirmed for level in found)
    assert levels([]) == []


def test_a_level_of_two_runs_at_the_end_is_not_confirmed() -> None:
    costs = quiet(100)
    costs[98:] *= 1.5
    assert [level.confirmed for level in levels(costs.tolist())] == [True, False]


def test_clean_series_hardly_ever_alarm() -> None:
    clean = gate_power.measure_clean(series=20, nights=300, seed=1)
    assert clean.alarms <= 1
    assert clean.nights_alarm_began <= 0.01


def test_the_figures_are_the_same_for_the_same_seed_and_rise_with_time() -> None:
    once, again = (gate_power.measure_steps(0.05, 0.01, tries=20, seed=3) for _ in range(2))
    assert once == again
    assert list(once.within) == sorted(once.within)
    assert once.within[2] >= 0.85 and once.within[9] == 1.0


def test_drift_is_found_before_it_totals_two_percent() -> None:
    drifts = gate_power.measure_drift(0.01, tries=4, seed=4)
    assert drifts.missed == 0 and drifts.p95_total < 0.02


def test_the_command_prints_and_writes(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    files = [str(tmp_path / name) for name in ("power.json", "power.html")]
    sizes = ["--series", "4", "--nights", "120", "--tries", "1"]
    assert gate_power.main([*sizes, "--json", files[0], "--plot", files[1]]) == 0
    assert "found within 3 runs" in capsys.readouterr().out
    assert '"within"' in (tmp_path / "power.json").read_text()
    assert "runs since the step" in (tmp_path / "power.html").read_text()


def test_noise_shares() -> None:
    sigmas = gate_power.mixed_sigmas(20)
    assert [int((sigmas == sigma).sum()) for sigma, _ in gate_power.NOISES] == [16, 3, 1]
    assert changepoints.Watch().windows[0].runs == 3
