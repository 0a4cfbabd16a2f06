"""Scenario multi: which CPUs an instance gets, what counts of a slice, and a real team of two on a tiny model."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import matrix, processes, team
from harness.errors import UsageError
from harness.matrix import Budget, Scenario
from harness.processes import WorkerError
from harness.team import Team
from harness.worker import WorkerSpec
from int8 import isa

TWO = "multi:2x1:b2:s16"
BUDGET = Budget(rounds=1, slice_s=0.2, min_iterations=5)
needs_two_cpus = pytest.mark.skipif(len(processes.worker_cpus()) < 2, reason="instances need CPUs of their own")


def spec(scenario: str = TWO) -> WorkerSpec:
    return WorkerSpec("tiny-bert", "int8", "fp32", isa.best(), "jit", None, (scenario,), processes.worker_cpus())


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Team]:
    found = team.start(spec(), tmp_path / "log")
    assert isinstance(found, Team)
    yield found
    found.kill()


def test_instances_get_disjoint_neighbours() -> None:
    scenario = Scenario.parse("multi:2x3:b8:s128")
    assert matrix.split_cpus((0, 1, 2, 3, 8, 9, 10), scenario) == ((0, 1, 2), (3, 8, 9))


def test_too_few_cpus_and_overlap_are_errors() -> None:
    with pytest.raises(UsageError, match="needs 6 CPUs of its own; there are 5"):
        matrix.split_cpus((0, 1, 2, 3, 4), Scenario.parse("multi:2x3:b8:s128"))
    with pytest.raises(UsageError, match="overlap"):
        matrix.split_cpus((0, 1, 1, 2), Scenario.parse("multi:2x1:b8:s128"))


def test_a_scenario_that_needs_more_cpus_is_skipped_with_the_reason() -> None:
    cell = matrix.parse_cell("minilm/int8/fp32/avx2/multi:4x2:b8:s128")
    assert matrix.skip_reason(cell, 8) is None
    assert matrix.skip_reason(cell, 7) == "multi:4x2:b8:s128 needs 8 CPUs of its own and this host grants 7"


def test_only_what_ran_beside_the_others_counts() -> None:
    early, late = (100.0, (1.0,) * 5), (101.5, (0.5,) * 8)  # 100 to 105 and 101.5 to 105.5
    assert team.overlapping([early, late]) == [(102.0, (1.0,) * 3), (101.5, (0.5,) * 7)]


def test_instances_that_missed_each_other_are_left_with_nothing() -> None:
    assert [samples for _, samples in team.overlapping([(0.0, (1.0,)), (5.0, (1.0,))])] == [(), ()]


@needs_two_cpus
def test_a_team_runs_at_once_on_cpus_of_its_own(two: Team) -> None:
    pinned = [os.sched_getaffinity(worker.pid) for worker in two._workers]
    assert [len(cpus) for cpus in pinned] == [1, 1] and not pinned[0] & pinned[1]
    ready = two.prepare()
    alone = 2 * (4 * 64 * 64 + 2 * 64 * 128) * 4
    assert ready["memory"]["linear_weight_bytes"] == 2 * alone  # each holds a model
    two.request("compile", scenario=TWO)
    assert two.request("evidence", scenario=TWO)["evidence"]["threads"] == 1
    answers = two.time(TWO, BUDGET)
    assert [set(answer["cpus"]) for answer in answers] == pinned
    assert len({answer["process"] for answer in answers}) == 2
    ends = [answer["t0"] + sum(answer["samples_s"]) for answer in answers]
    for one, other in itertools.permutations(range(2)):
        assert answers[one]["t0"] < ends[other]
    two.end()
    assert not two.alive


@needs_two_cpus
def test_a_team_survives_a_refusal_and_dies_with_any_of_its_workers(two: Team) -> None:
    with pytest.raises(WorkerError, match="nothing is prepared"):
        two.time(TWO, BUDGET)
    assert two.alive
    two._workers[1].kill()
    with pytest.raises(WorkerError):
        two.time(TWO, BUDGET)


def test_one_worker_is_no_team(tmp_path: Path) -> None:
    found = team.start(spec("offline:b2:s16"), tmp_path / "log")
    try:
        assert isinstance(found, processes.WorkerHandle)
    finally:
        found.kill()
