"""Examples kept with their text: which ones, and what FP32 thought of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from harness.tasks import notable


@dataclass(frozen=True)
class Text:
    text: str


class Classes:
    """As much of a task as is asked: outputs are logits."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def examples(self, limit: int | None = None) -> list[Text]:
        return [Text(text) for text in self._texts[:limit]]

    def kept(self, outputs: Any) -> dict[str, Any]:
        return {"logits": outputs, "labels": np.zeros(len(outputs), dtype=np.int16)}


@dataclass(frozen=True)
class Asked:
    question: str


class Answers:
    """Outputs are (answer's place, score)."""

    def examples(self, limit: int | None = None) -> list[Asked]:
        return [Asked(f"question {place}") for place in range(3)][:limit]

    def kept(self, outputs: Any) -> dict[str, Any]:
        return {"answers": np.array([f"answer {int(one)}" for one in outputs[:, 0]]), "f1": outputs[:, 1]}


def found(own: list[list[float]], fp32: list[list[float]], texts: list[str] | None = None) -> dict[str, Any]:
    task: Any = Classes(texts or [f"text {place}" for place in range(len(own))])
    return notable.notable(task, np.array(own, dtype=np.float32), np.array(fp32, dtype=np.float32))


def test_the_worst_is_the_flip_that_fp32_was_surest_of() -> None:
    kept = found([[1, 0], [0, 1], [0, 5], [3, 0]], [[1, 0], [0.1, 0], [4, 0], [9, 0]])
    assert kept["worst"].tolist() == [2, 1, 3, 0], "flips by FP32's margin, then the margins that shrank most"
    assert kept["worst_texts"].tolist() == ["text 2", "text 1", "text 3", "text 0"]
    assert kept["worst_fp32"][0].tolist() == [4, 0]


def test_flips_are_counted_by_the_margin_of_fp32() -> None:
    rng = np.random.default_rng(3)
    fp32 = rng.normal(0, 2, (1000, 3))
    own = fp32 + rng.normal(0, 0.3, fp32.shape)
    kept = found(own.tolist(), fp32.tolist())
    flipped = int((own.argmax(1) != fp32.argmax(1)).sum())
    assert kept["margin_counts"].sum() == 1000
    assert kept["margin_flips"].sum() == flipped > 0
    assert kept["margin_counts"].min() >= 95
    assert kept["margin_flips"][0] > kept["margin_flips"][-1]
    assert (np.diff(kept["margin_edges"]) >= 0).all()
    assert len(kept["worst"]) == notable.MOST


def test_equal_margins_are_one_group() -> None:
    kept = found([[1, 0]] * 5, [[1, 0]] * 5)
    assert kept["margin_counts"].sum() == 5
    assert kept["margin_flips"].sum() == 0


def test_a_long_text_is_cut_and_holds_no_zero() -> None:
    kept = found([[0, 1]], [[1, 0]], ["\0" + "x" * 1000])
    assert len(kept["worst_texts"][0]) == notable.LETTERS
    assert kept["worst_texts"][0].endswith("…")


def test_answers_are_sorted_by_the_score_that_was_lost() -> None:
    own, fp32 = np.array([[0, 1.0], [7, 0.2], [2, 0.9]]), np.array([[0, 1.0], [1, 1.0], [2, 1.0]])
    task: Any = Answers()
    kept = notable.notable(task, own.astype(np.float32), fp32.astype(np.float32))
    assert kept["worst"].tolist() == [1, 2]
    assert kept["worst_texts"].tolist() == ["question 1", "question 2"]
    assert kept["worst_fp32"].tolist() == ["answer 1", "answer 2"]


@pytest.mark.parametrize("classes", [2, 3])
def test_a_margin_is_the_distance_to_the_next(classes: int) -> None:
    assert notable.margins(np.array([[5.0, 2.0, -1.0][:classes]])).tolist() == [3.0]
