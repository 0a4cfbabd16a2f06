"""Accuracy of predictions beside those of eager FP32, on paired examples."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from harness import stats
from harness.records import Accuracy
from harness.tasks.base import Floats, Indices

Scores = npt.NDArray[np.float64]


def paired_accuracy(
    metric: str,
    scores: Scores,
    fp32_scores: Scores,
    changed: npt.NDArray[np.bool_],
    outputs: Floats,
    reference_outputs: Floats,
    *,
    chance: float,
    others: Mapping[str, float] | None = None,
) -> Accuracy:
    """The mean score of n predictions beside that of eager FP32's for the same examples.

    ``scores`` and ``fp32_scores`` are (n,), 0 to 1 (right or wrong, F1); ``changed`` says whose prediction differs.
    ``flips_gained`` and ``flips_lost`` count the examples whose score rose and fell. ``sqnr_db`` is over all outputs;
    None where both are equal to the bit, so that there is no noise to rate. ``cosine`` is the mean over rows.
    """
    delta, interval = stats.paired_difference(scores, fp32_scores)
    return Accuracy(
        metric=metric,
        value=float(scores.mean()),
        fp32_value=float(fp32_scores.mean()),
        chance=chance,
        delta=delta,
        delta_ci95=interval,
        n=len(scores),
        flips=float(changed.mean()),
        flips_gained=int((scores > fp32_scores).sum()),
        flips_lost=int((scores < fp32_scores).sum()),
        sqnr_db=sqnr_db(outputs, reference_outputs),
        cosine=mean_cosine(outputs, reference_outputs),
        others=dict(others or {}),
    )


def paired_classes(
    predicted: Indices, expected: Indices, labels: Indices, outputs: Floats, reference_outputs: Floats
) -> Accuracy:
    """Accuracy of (n,) predicted classes beside eager FP32's ``expected``. Chance is naming the commonest class."""
    right, fp32_right = (predicted == labels).astype(np.float64), (expected == labels).astype(np.float64)
    chance = float(np.bincount(labels).max() / len(labels))
    return paired_accuracy(
        "accuracy", right, fp32_right, predicted != expected, outputs, reference_outputs, chance=chance
    )


def sqnr_db(outputs: Floats, reference_outputs: Floats) -> float | None:
    """10 log10 of the reference's sum of squares over that of the error, in dB; None without error or signal."""
    signal = np.sum(reference_outputs.astype(np.float64) ** 2)
    noise = np.sum((reference_outputs.astype(np.float64) - outputs) ** 2)
    return float(10 * np.log10(signal / noise)) if noise > 0 and signal > 0 else None


def mean_cosine(outputs: Floats, reference_outputs: Floats) -> float | None:
    """Mean over rows of the cosine between outputs and reference; None where a row is all zeros."""
    rows = len(outputs)
    left, right = (one.reshape(rows, -1).astype(np.float64) for one in (outputs, reference_outputs))
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return float(np.mean(np.sum(left * right, axis=1) / norms)) if (norms > 0).all() else None


def at_chance(accuracy: Accuracy) -> bool:
    """Whether the value cannot be told from always naming the commonest class; the rule is the gate's."""
    return stats.at_chance(accuracy.value, accuracy.chance, accuracy.n)
