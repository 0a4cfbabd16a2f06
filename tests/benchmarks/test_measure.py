"""What asv is told of a record."""

from __future__ import annotations

import itertools

import pytest

from benchmarks import measure
from harness.errors import UsageError
from harness.records import Accuracy, Cell, Memory, Record, Round, Timing

CELL = Cell("minilm", "int8", "sq-static", "vnni", "offline:b8:s128", task="reviews")


def _record(**parts: object) -> Record:
    return Record(run_id="r", commit=None, status="ok", reason=None, cell=CELL, **parts)  # type: ignore[arg-type]


def test_summary_holds_every_number_that_is_tracked() -> None:
    rounds = (Round(0.0, 1, (0.1, 0.2)), Round(5.0, 2, (0.3,)))
    accuracy = Accuracy("accuracy", 0.72, 0.73, 0.5, -0.01, None, 100, 0.02, 1, 2, 23.0, 0.99)
    summary = measure.summary(
        _record(timing=Timing(rounds=rounds, quantize_s=1.5), memory=Memory(model_bytes=99), accuracy=accuracy)
    )
    assert summary["batch"] == 8
    assert summary["batch_s"] == [0.1, 0.2, 0.3]
    assert summary["accuracy_drop"] == pytest.approx(0.01)
    assert (summary["model_bytes"], summary["quantize_s"], summary["status"]) == (99, 1.5, "ok")


def test_what_was_not_measured_is_none_and_not_zero() -> None:
    summary = measure.summary(_record())
    assert [summary[name] for name in ("accuracy_drop", "model_bytes", "quantize_s")] == [None, None, None]


@pytest.mark.parametrize(("given", "kept"), [(0, 0), (1, 1), (50, 50), (51, 26), (1000, 50)])
def test_long_rounds_are_thinned_evenly(given: int, kept: int) -> None:
    samples = tuple(float(n) for n in range(given))
    timing = Timing(rounds=(Round(0.0, 1, samples),))
    thinned = measure.summary(_record(timing=timing))["batch_s"]
    assert len(thinned) == kept
    assert len({b - a for a, b in itertools.pairwise(thinned)}) <= 1


def test_profile_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(measure.PROFILE_VARIABLE, raising=False)
    assert measure.profile().name == "quick"
    monkeypatch.setenv(measure.PROFILE_VARIABLE, "smoke")
    assert measure.profile().name == "smoke"
    monkeypatch.setenv(measure.PROFILE_VARIABLE, "smok")
    with pytest.raises(UsageError, match="smoke"):
        measure.profile()
