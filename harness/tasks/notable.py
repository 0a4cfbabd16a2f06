"""Examples worth reading, kept beside a judged cell's predictions: where INT8 and FP32 part, and how sure FP32 was.

Few of them, with their text, so that a page can show them without the data set. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.tasks.base import Floats, Task

#: How many examples are kept, and letters of each of their texts.
MOST, LETTERS = 24, 400
#: Into how many groups of equal size examples are put by FP32's margin.
GROUPS = 10

Arrays = dict[str, npt.NDArray[Any]]


def notable(task: Task, outputs: Floats, reference: Floats) -> Arrays:
    """Arrays for the sidecar file of a judged cell.

    For classes, worst first: ``worst`` (indices of examples), ``worst_texts``, ``worst_fp32`` (FP32's logits). Worst
    are those whose prediction changed although FP32 was surest, then those whose margin shrank most. ``margin_edges``
    (GROUPS + 1 margins of FP32), ``margin_counts`` and ``margin_flips`` (GROUPS): how many examples lie between, and
    how many of them changed. A sound quantization flips what FP32 was unsure of.

    For scored answers: ``worst``, ``worst_texts``, ``worst_fp32`` (FP32's answers), by the score that was lost.

    Args:
        task: whose first examples these are.
        outputs, reference: (n, D), the cell's and eager FP32's.
    """
    own, fp32 = task.kept(outputs), task.kept(reference)
    examples = task.examples(len(own.get("labels", own.get("f1", ()))))
    if "logits" in own:
        return _of_classes(examples, own["logits"], fp32["logits"])
    if "f1" in own:
        lost = np.asarray(fp32["f1"], dtype=np.float64) - own["f1"]
        worst = [int(place) for place in np.argsort(-lost, kind="stable")[:MOST] if lost[place] > 0]
        return {**_texts(examples, worst), "worst_fp32": np.array([str(fp32["answers"][place]) for place in worst])}
    return {}


def margins(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """How far the largest of (n, C) logits lies above the next, (n,)."""
    ordered = np.sort(np.asarray(logits, dtype=np.float64), axis=1)
    gaps: npt.NDArray[np.float64] = ordered[:, -1] - ordered[:, -2]
    return gaps


def _of_classes(examples: Sequence[Any], own: npt.NDArray[Any], fp32: npt.NDArray[Any]) -> Arrays:
    sure = margins(fp32)
    chosen = np.argmax(fp32, axis=1)
    flipped = np.argmax(own, axis=1) != chosen
    rows = np.arange(len(own))
    others = np.array(own, dtype=np.float64)
    others[rows, chosen] = -np.inf
    left = own[rows, chosen] - others.max(axis=1)  # the margin that FP32's choice has under the recipe
    order = np.lexsort((left - sure, -np.where(flipped, sure, -1.0)))
    worst = [int(place) for place in order[:MOST]]
    edges = np.quantile(sure, np.linspace(0.0, 1.0, GROUPS + 1))
    group = np.clip(np.searchsorted(edges, sure, side="right") - 1, 0, GROUPS - 1)
    return {
        **_texts(examples, worst),
        "worst_fp32": np.asarray(fp32[worst], dtype=np.float32),
        "margin_edges": edges.astype(np.float32),
        "margin_counts": np.bincount(group, minlength=GROUPS).astype(np.int32),
        "margin_flips": np.bincount(group[flipped], minlength=GROUPS).astype(np.int32),
    }


def _texts(examples: Sequence[Any], worst: Sequence[int]) -> Arrays:
    texts = [_text(examples[place]) for place in worst]
    return {"worst": np.array(worst, dtype=np.int32), "worst_texts": np.array(texts, dtype=np.str_)}


def _text(example: Any) -> str:
    """What a person would read of an example: its text, its texts, or its question."""
    parts = getattr(example, "texts", None) or (getattr(example, "text", None) or getattr(example, "question", ""),)
    text = " / ".join(str(part) for part in parts).replace("\0", " ")
    return text if len(text) <= LETTERS else text[: LETTERS - 1] + "…"
