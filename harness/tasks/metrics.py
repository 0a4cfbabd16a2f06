"""Metrics in the form of the library ``evaluate``, for use beside it: its own come from a hub, these do not.

They rest on the functions that the tasks judge with. Importing this module imports ``evaluate`` and pandas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import evaluate

from harness import assets
from harness.errors import UsageError
from harness.tasks import scores


class Accuracy(evaluate.Metric):  # type: ignore[misc]
    """Share of predictions that equal their reference: ``{"accuracy": 0..1}``. Both are class ids."""

    def _info(self) -> evaluate.MetricInfo:
        integer = datasets.Value("int64")
        return _about("share of right classes", {"predictions": integer, "references": integer})

    def _compute(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        return {"accuracy": _mean([float(one == other) for one, other in zip(predictions, references, strict=True)])}


class Squad(evaluate.Metric):  # type: ignore[misc]
    """``{"exact_match": 0..100, "f1": 0..100}``, in percent as SQuAD v1.1's script prints them.

    A prediction is ``{"id", "prediction_text"}``, a reference ``{"id", "answers": {"text": [...], "answer_start":
    [...]}}``. A question without a prediction scores zero.
    """

    def _info(self) -> evaluate.MetricInfo:
        text, position = datasets.Value("string"), datasets.Value("int64")
        answers = {"text": datasets.Sequence(text), "answer_start": datasets.Sequence(position)}
        prediction = {"id": text, "prediction_text": text}
        return _about("SQuAD v1.1", {"predictions": prediction, "references": {"id": text, "answers": answers}})

    def _compute(
        self, predictions: Sequence[Mapping[str, Any]], references: Sequence[Mapping[str, Any]]
    ) -> dict[str, float]:
        texts = {one["id"]: one["prediction_text"] for one in predictions}

        def percent(score: scores.Score) -> float:
            given = ((texts.get(one["id"]), one["answers"]["text"]) for one in references)
            return 100 * _mean([0.0 if text is None else score(text, golds) for text, golds in given])

        return {"exact_match": percent(scores.exact_match), "f1": percent(scores.f1)}


METRICS: dict[str, type[evaluate.Metric]] = {"accuracy": Accuracy, "squad": Squad}


def load(name: str) -> evaluate.Metric:
    """A metric by name, as ``evaluate.load`` gives one; it keeps what it is given in memory. UsageError if unknown."""
    if name not in METRICS:
        raise UsageError(assets.nearest("metric", name, METRICS))
    return METRICS[name](keep_in_memory=True)


def _about(description: str, features: Mapping[str, Any]) -> evaluate.MetricInfo:
    return evaluate.MetricInfo(
        description=description, citation="", inputs_description="", features=datasets.Features(dict(features))
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
