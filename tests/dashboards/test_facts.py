"""What a record keeps of itself on its way to a page."""

from __future__ import annotations

import dataclasses
import math

import pytest
from site_samples import make_accuracy, make_header, make_record

from dashboards import judging
from dashboards.facts import FAIL, PASS, UNJUDGED, digest, facts_of, spread
from harness import verdicts
from harness.records import Cell, Evidence, Round, Run

REAL = Cell("m", "int8", "sq-static", "amx", "offline:b8:s128", task="reviews", weights="real")
HEADER = make_header("run", 0.0)


def facts(record):
    return facts_of(record, judging.trust(record, HEADER))


def test_a_good_cell_shows_its_speed() -> None:
    found = facts(make_record("run", REAL))
    assert (found.trust.outcome, found.withheld) == (PASS, False)
    assert found.speedup == pytest.approx(4.0)
    assert found.throughput == pytest.approx(800.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"accuracy": make_accuracy(delta=-0.02)},
        {"accuracy": make_accuracy(flips=0.05)},
        {"accuracy": make_accuracy(delta=math.nan)},
        {"accuracy": None},
        {"evidence": Evidence(4, 4, 3, {}, "amx", True)},
        {"evidence": Evidence(4, 4, 4, {}, "vnni", True)},
    ],
    ids=["accuracy", "flips", "no number", "not judged", "not fused", "another ISA"],
)
def test_speed_without_accuracy_or_evidence_never_leaves_the_record(changes) -> None:
    found = facts(make_record("run", REAL, **changes))
    assert found.trust.outcome == FAIL
    assert found.withheld
    shown = [found.throughput, found.p50, found.p90, found.p99, found.speedup]
    intervals = [found.throughput_ci, found.p50_ci, found.speedup_ci]
    assert shown == [None] * 5
    assert intervals == [None] * 3
    assert found.trust.reason


def test_synthetic_weights_are_measured_for_speed_alone() -> None:
    cell = dataclasses.replace(REAL, weights="synthetic", task=None)
    found = facts(make_record("run", cell))
    assert (found.trust.outcome, found.withheld) == (UNJUDGED, False)
    assert found.speedup is not None


def test_real_weights_that_nobody_judged_show_no_speed() -> None:
    found = facts(make_record("run", dataclasses.replace(REAL, task=None)))
    assert (found.trust.outcome, found.withheld, found.speedup) == (UNJUDGED, True, None)


@pytest.mark.parametrize("status", ["failed", "skipped", "invalid"])
def test_a_cell_that_is_not_ok_shows_no_number(status) -> None:
    found = facts(make_record("run", REAL, status=status, reason="because"))
    assert (found.throughput, found.speedup, found.reason) == (None, None, "because")


def test_a_prepared_model_that_fails_once_shows_no_speed_under_any_scenario() -> None:
    bad = make_record("run", REAL, accuracy=make_accuracy(delta=-0.1))
    other = make_record("run", dataclasses.replace(REAL, scenario="single:s128"))
    innocent = make_record("run", dataclasses.replace(REAL, isa="vnni"))
    found = digest(Run(HEADER, (bad, other, innocent)), judging.trust).facts
    assert [one.withheld for one in found] == [True, True, False]
    assert found[1].trust.of == bad.cell.key


def test_of_several_records_of_a_cell_the_last_one_counts() -> None:
    found = digest(Run(HEADER, (make_record("run", REAL, 0.02), make_record("run", REAL, 0.01))), judging.trust)
    assert [one.p50 for one in found.facts] == [0.01]


def test_the_interval_of_rounds() -> None:
    def rounds(*medians: float) -> list[Round]:
        return [Round(0.0, 1, (median,) * 3) for median in medians]

    assert spread(rounds(1.0)) is None
    assert spread(rounds(1.0, math.inf)) is None
    assert spread(rounds(2.0, 2.0, 2.0)) == pytest.approx((1.0, 1.0))
    # two rounds that differ by a factor of e**0.02: t = 12.706, deviation 0.02/sqrt(2), over sqrt(2)
    low, high = spread(rounds(1.0, math.exp(0.02)))
    assert math.log(high) == pytest.approx(12.7062 * 0.01, rel=1e-4)
    assert low * high == pytest.approx(1.0)


@pytest.mark.parametrize("delta", [0.0, -0.1])
@pytest.mark.parametrize("flips", [0.0, 0.2])
@pytest.mark.parametrize("fused", [3, 4])
@pytest.mark.parametrize("weights", ["real", "synthetic", None])
@pytest.mark.parametrize("task", ["reviews", None])
@pytest.mark.parametrize("recipe", ["fp32", "sq-static"])
def test_what_is_shown_is_what_the_harness_publishes(delta, flips, fused, weights, task, recipe) -> None:
    cell = dataclasses.replace(REAL, recipe=recipe, weights=weights, task=task)
    judged = make_accuracy(delta, flips) if task else None
    record = make_record("run", cell, accuracy=judged, evidence=Evidence(4, 4, fused, {}, "amx", True))
    published = verdicts.published_speedup(record, verdicts.judge_record(record, HEADER))
    assert (facts(record).speedup is None) == (published is None)
