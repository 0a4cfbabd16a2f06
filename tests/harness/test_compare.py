"""Two revisions measured against each other: what is planned, how pairs become verdicts, and two real commits."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import compare, comparison, disturbance, revisions
from harness.compare import Options, RevisionFailedError, Sample
from harness.errors import UsageError
from harness.matrix import Budget, Overrides
from harness.processes import Home
from harness.records import Cell, Disturbance
from harness.revisions import Revision
from int8 import isa

ROOT = Path(__file__).resolve().parents[2]
HERE = Revision("here", None, Home.own())
TINY = Overrides(models=("tiny-bert",), recipes=("sq-static",), scenarios=("offline:b2:s16",), tasks=("tiny-reviews",))
BUDGET = Budget(rounds=4, slice_s=0.05, min_iterations=3, warmup_s=0.5)


def test_by_default_the_gated_recipes_of_minilm_are_compared_under_the_best_isa() -> None:
    groups = compare.plan(Options())
    keys = {cell.key for cells in groups for cell in cells}
    assert keys == {f"minilm/int8/{r}/{isa.best()}/offline:b8:s128@reviews" for r in ("sq-static", "sq-dynamic")}
    assert len(groups) == 2  # a worker each


def test_scenarios_of_a_recipe_share_a_worker_and_multi_has_its_own() -> None:
    scenarios = ("offline:b2:s16", "single:s16", "multi:1x1:b2:s16")
    groups = compare.plan(Options(dataclasses.replace(TINY, scenarios=scenarios)))
    assert sorted(len(cells) for cells in groups) == [1, 2]


def test_wrong_names_and_hopeless_wishes_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="unknown model"):
        compare.plan(Options(Overrides(models=("minilmm",))))
    with pytest.raises(UsageError, match="no cell is left"):
        compare.plan(Options(Overrides(scenarios=("multi:9999x9:b8:s128",))))
    with pytest.raises(UsageError, match="--max-rounds"):
        Options(max_pairs=comparison.MIN_PAIRS - 1)
    with pytest.raises(UsageError, match="--margin"):
        Options(margin=2.0)


def given_pairs(
    monkeypatch: pytest.MonkeyPatch, slowdown: float, noise: float = 0.003, others: float = 0.0
) -> list[int]:
    """Pairs that come from a generator instead of processes; returns the numbers of the pairs that were asked for."""
    asked: list[int] = []
    rng = np.random.default_rng(5)

    def measure_pair(
        pair: Any, cells: Sequence[Cell], options: Options, number: int = 0, judge: bool = False
    ) -> Sample:
        asked.append(number)
        host = 0.1 * np.exp(rng.normal(0, 0.2))
        a, b = (host * np.exp(rng.normal(0, noise, 4) + rng.normal(0, noise)) * (1 + s) for s in (0, slowdown))
        logits = np.eye(2)[rng.integers(0, 2, 50)]
        kept = {"logits": logits, "labels": np.zeros(50)}
        watched = Disturbance(2.0, others, 0.0)
        return Sample({cell.scenario: (a, b) for cell in cells}, (kept, kept) if judge else None, watched)

    monkeypatch.setattr(compare, "measure_pair", measure_pair)
    return asked


@pytest.mark.parametrize(("slowdown", "code"), [(0.0, 0), (0.05, 1), (-0.2, 0)])
def test_it_measures_until_it_is_decided(monkeypatch: pytest.MonkeyPatch, slowdown: float, code: int) -> None:
    asked = given_pairs(monkeypatch, slowdown)
    found = compare.compare(HERE, HERE, Options(TINY))
    assert found.exit_code == code
    assert comparison.MIN_PAIRS <= len(asked) < comparison.MAX_PAIRS
    assert [one.flips for one in found.accuracy] == [0.0]
    assert [one.name for one in found.groups] == ["tiny-bert sq-static"]


def test_what_stays_undecided_ends_at_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = given_pairs(monkeypatch, 0.02, noise=0.1)
    assert compare.compare(HERE, HERE, Options(TINY, max_pairs=7)).exit_code == 4
    assert len(asked) == 7


def test_a_stored_noise_floor_counts_for_the_cell_with_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    given_pairs(monkeypatch, 0.05)
    cell = f"tiny-bert/int8/sq-static/{isa.best()}/offline:b2:s16"
    found = compare.compare(HERE, HERE, Options(TINY, floors={cell: 0.12}))
    assert found.exit_code == 0 and found.speed[0].limit == pytest.approx(0.88)


def test_disturbed_pairs_are_measured_again_and_too_many_are_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(disturbance.VARIABLE, raising=False)
    asked = given_pairs(monkeypatch, 0.0, others=0.6)
    found = compare.compare(HERE, HERE, Options(TINY))
    assert found.exit_code == 3
    assert "other processes took 60%" in (found.invalid_reason or "")
    assert len(asked) == compare.DISTURBED_PAIRS


def test_a_revision_that_fails_is_named_and_measured_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def measure_pair(*_: Any, **__: Any) -> Sample:
        asked.append(1)
        raise RevisionFailedError("there", "only 3 of 4 quantized linears run in a fused kernel")

    monkeypatch.setattr(compare, "measure_pair", measure_pair)
    found = compare.compare(HERE, HERE, Options(TINY))
    assert (found.exit_code, len(asked)) == (2, 1)
    assert (found.failures[0].revision, found.failures[0].reason.split()[0]) == ("there", "only")


def test_instances_of_a_slice_add_up() -> None:
    assert compare.slice_time_s([{"samples_s": [0.2, 0.1, 0.3]}]) == pytest.approx(0.2)
    assert compare.slice_time_s([{"samples_s": [0.2]}, {"samples_s": [0.2]}]) == pytest.approx(0.1)


# --- real commits -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of this project, whose newest commit changes a comment."""
    root = tmp_path_factory.mktemp("copies") / "copy"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(root)], check=True)
    commit(root, "harness/timing.py", "#: Iterations in a window", "#: How many iterations are in a window")
    return root


def commit(root: Path, name: str, before: str, after: str) -> None:
    text = (root / name).read_text(encoding="utf-8")
    assert text.count(before) == 1, name
    (root / name).write_text(text.replace(before, after), encoding="utf-8")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *who, "commit", "--quiet", "--all", "-m", "Change"], cwd=root, check=True)


def pair(root: Path) -> tuple[Revision, Revision]:
    return revisions.check_out("HEAD~1", root), revisions.check_out("HEAD", root)


def measured(root: Path) -> tuple[list[Cell], Sample]:
    options = Options(TINY, budget=BUDGET, examples=64)
    (cells,) = compare.plan(options)
    return cells, compare.measure_pair(pair(root), cells, options, 0, judge=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_commit_that_changes_a_comment_changes_no_prediction(copy: Path) -> None:
    cells, found = measured(copy)
    assert found.kept is not None
    verdict = comparison.judge_predictions(cells[0].key, *found.kept)
    assert (verdict.outcome, verdict.flips) == ("pass", 0.0)
    a, b = found.times[cells[0].scenario]
    assert len(a) == len(b) == BUDGET.rounds and min(*a, *b) > 0
    assert found.disturbance is not None and found.disturbance.seconds > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_commit_that_breaks_a_scale_is_caught(copy: Path) -> None:
    commit(copy, "harness/faults.py", "name = os.environ.get(VARIABLE) or None", 'name = "scale"')
    cells, found = measured(copy)
    assert found.kept is not None
    assert comparison.judge_predictions(cells[0].key, *found.kept).outcome == "regression"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_commit_that_unfuses_a_linear_fails_by_its_name(copy: Path) -> None:
    commit(copy, "harness/faults.py", 'name = "scale"', 'name = "unfused"')
    with pytest.raises(RevisionFailedError, match="fused kernel") as error:
        measured(copy)
    assert error.value.revision == "HEAD"


def test_a_worker_of_a_newer_protocol_is_refused(tmp_path: Path) -> None:
    tree = tmp_path / "newer"
    (tree / "harness").mkdir(parents=True)
    (tree / "harness" / "__init__.py").touch()
    (tree / "harness" / "worker.py").write_text(
        "import os, sys\n"
        "commands, replies = (int(one) for one in sys.argv[1:])\n"
        "os.read(commands, 100)\n"
        'os.write(replies, b\'{"event": "done", "protocol": 99}\\n\')\n'
        "os.read(commands, 100)\n"
    )
    newer = Revision("newer", None, Home(tree, HERE.home.python))
    (cells,) = compare.plan(Options(TINY))
    with pytest.raises(RevisionFailedError, match=r"speaks protocol 99.*newer revision"):
        compare.measure_pair((newer, HERE), cells, Options(TINY))
