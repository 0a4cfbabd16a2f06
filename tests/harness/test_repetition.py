"""Predictions against those of an earlier run, from the files beside the records."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from judged import accuracy, cell, header, record

from harness import gating
from harness.records import Store
from harness.repetition import predictions
from harness.verdicts import Verdict

N = 1000
LABELS = np.arange(N) % 2


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


def logits_of(classes: np.ndarray) -> np.ndarray:
    return np.stack([1 - classes, classes], axis=1).astype(np.float32)


def measured(store: Store, number: int, changed: int, *, labels: np.ndarray = LABELS, **other: Any) -> None:
    """Keep a run whose predictions differ from the labels in the first ``changed`` examples."""
    classes = labels.copy()
    classes[:changed] = 1 - classes[:changed]
    made = header(f"run-{number}", started_at=float(number), **{"dirty": False, **other})
    with store.create_run(made) as writer:
        outputs = writer.write_outputs(cell().key, {"logits": logits_of(classes), "labels": labels})
        one = record(cell(), run_id=made.run_id, accuracy=accuracy(n=len(labels), outputs=outputs))
        writer.append(one)
        writer.append(dataclasses.replace(one, cell=cell(scenario="single:s128")))
        writer.finish()


def verdict(store: Store) -> Verdict | None:
    found = [one for one in gating.gate(store, known=()).verdicts if one.metric == "flips_previous"]
    assert len(found) in (0, 2), "all scenarios of a prepared model share its predictions"
    return found[0] if found else None


@pytest.mark.parametrize(("changed", "outcome"), [(0, "pass"), (2, "pass"), (3, "regression")])
def test_the_same_commit_should_repeat_itself(store: Store, changed: int, outcome: str) -> None:
    measured(store, 1, 0)
    measured(store, 2, changed)
    found = verdict(store)
    assert found is not None and found.outcome == outcome and found.gated
    assert (found.value, found.limit, found.baseline_run) == (changed / N, 0.002, "run-1")
    assert gating.gate(store).exit_code == (outcome == "regression")


@pytest.mark.parametrize(("changed", "outcome"), [(3, "pass"), (10, "pass"), (11, "regression")])
@pytest.mark.parametrize("other", [{"commit": "f00d"}, {"versions": {"torch": "2.14.0"}}, {"dirty": True}])
def test_another_commit_or_version_may_change_a_little(
    store: Store, changed: int, outcome: str, other: dict[str, Any]
) -> None:
    measured(store, 1, 0)
    measured(store, 2, changed, **other)
    found = verdict(store)
    assert found is not None and found.outcome == outcome and found.limit == 0.01


def test_an_accepted_run_is_what_later_ones_are_held_against(store: Store) -> None:
    measured(store, 1, 0)
    store.accept("run-1")
    for number, changed in ((2, 6), (3, 12)):
        measured(store, number, changed, commit=f"{number}00000")
    found = verdict(store)
    assert found is not None and (found.outcome, found.baseline_run) == ("regression", "run-1"), "small steps add up"
    assert ("accept", "harness accept run-3") in gating._verdicts.commands(found, "run-3")
    store.accept("run-3")
    assert gating.gate(store).exit_code == 0
    measured(store, 4, 12, commit="400000")
    assert verdict(store).value == 0  # type: ignore[union-attr]


def test_what_cannot_be_compared_is_noted_and_not_failed(store: Store) -> None:
    measured(store, 1, 0)
    measured(store, 2, 500, labels=1 - LABELS)
    assert verdict(store) is None
    assert any("other examples" in note for note in gating.gate(store).notes)
    measured(store, 3, 0, labels=LABELS[:500])
    assert verdict(store) is None
    for path in (store.root / "outputs" / "run-2").iterdir():
        path.unlink()
    report = gating.gate(store)
    assert report.exit_code == 0 and any("is not here" in note for note in report.notes)


def test_answers_are_predictions_too() -> None:
    assert predictions({"answers": np.array(["a", "b"])}).tolist() == ["a", "b"]  # type: ignore[union-attr]
    assert predictions({"logits": np.array([[0.0, 1.0], [2.0, 1.0]])}).tolist() == [1, 0]  # type: ignore[union-attr]
    assert predictions({"loss": np.zeros(3)}) is None
