"""Accuracy of predictions beside those of eager FP32, on paired examples."""

from __future__ import annotations

import numpy as np

from harness.records import Accuracy
from harness.tasks.base import Floats, Indices

RESAMPLES = 10_000
_BOOTSTRAP_SEED = 20240607


def paired_accuracy(
    predicted: Indices, expected: Indices, labels: Indices, outputs: Floats, reference_outputs: Floats
) -> Accuracy:
    """Accuracy of predictions beside those of eager FP32 (``expected``) for the same n examples, one a row.

    ``sqnr_db`` is over all examples; None where both outputs are equal to the bit, so that there is no noise to rate.
    ``cosine`` is the mean over examples.
    """
    right, fp32_right = predicted == labels, expected == labels
    n, gained, lost = len(labels), int((right & ~fp32_right).sum()), int((~right & fp32_right).sum())
    return Accuracy(
        metric="accuracy",
        value=float(right.mean()),
        fp32_value=float(fp32_right.mean()),
        chance=float(np.bincount(labels).max() / n),
        delta=(gained - lost) / n,
        delta_ci95=bootstrap_delta(gained, lost, n),
        n=n,
        flips=float((predicted != expected).mean()),
        flips_gained=gained,
        flips_lost=lost,
        sqnr_db=sqnr_db(outputs, reference_outputs),
        cosine=mean_cosine(outputs, reference_outputs),
    )


def bootstrap_delta(gained: int, lost: int, n: int) -> tuple[float, float]:
    """95 % percentile interval of the accuracy difference, by a bootstrap over paired examples.

    Resampling n pairs is drawing from the multinomial of their joint outcomes; of those, right in both and wrong in
    both do not move the difference and are drawn as one. Fixed seed.
    """
    outcomes = [gained / n, lost / n, (n - gained - lost) / n]
    draws = np.random.default_rng(_BOOTSTRAP_SEED).multinomial(n, outcomes, RESAMPLES)
    low, high = np.quantile((draws[:, 0] - draws[:, 1]) / n, [0.025, 0.975])
    return float(low), float(high)


def sqnr_db(outputs: Floats, reference_outputs: Floats) -> float | None:
    """10 log10 of the reference's sum of squares over that of the error, in dB; None without error or signal."""
    signal = np.sum(reference_outputs.astype(np.float64) ** 2)
    noise = np.sum((reference_outputs.astype(np.float64) - outputs) ** 2)
    return float(10 * np.log10(signal / noise)) if noise > 0 and signal > 0 else None


def mean_cosine(outputs: Floats, reference_outputs: Floats) -> float | None:
    """Mean over rows of the cosine between outputs and reference; None where a row is all zeros."""
    left, right = outputs.astype(np.float64), reference_outputs.astype(np.float64)
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return float(np.mean(np.sum(left * right, axis=1) / norms)) if (norms > 0).all() else None


def at_chance(accuracy: Accuracy) -> bool:
    """Whether the value cannot be told from always naming the commonest class; the rule is the gate's."""
    from harness import stats

    return stats.at_chance(accuracy.value, accuracy.chance, accuracy.n)
