"""Task ``squad``: questions answered by a span of a text, scored as SQuAD v1.1's official script scores them.

A text that is longer than the model takes is read in windows that overlap. Every window gives logits of the answer's
first and last token; the best valid span over all windows of a question is its answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.errors import AssetError, UsageError
from harness.records import Accuracy
from harness.tasks import files, scores
from harness.tasks.base import (
    Floats,
    Request,
    Row,
    RowBatches,
    TaskError,
    Tokens,
    check_outputs,
    check_seq,
    fingerprint_of,
    first,
    sha256_of,
)
from harness.tasks.judging import paired_accuracy

if TYPE_CHECKING:
    from torch import Tensor

    from harness.tasks.base import Batch

_CHUNK = 256  # questions cut into windows at once


@dataclass(frozen=True)
class Question:
    """A question about a context, and the texts that are right answers."""

    id: str
    question: str
    context: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Cut:
    """How texts are cut, in tokens.

    Attributes:
        length: of a window, special tokens and question included.
        overlap: context that neighbouring windows share (``stride`` of transformers' tokenizers).
        question: longest question; the rest of a longer one is not read.
        answer: longest answer.
        n_best: starts and ends looked at in each window.
    """

    length: int
    overlap: int
    question: int
    answer: int
    n_best: int


@dataclass(frozen=True)
class Window:
    """A question with a part of its context. ``spans``: (length, 2) characters of each token in the context, -1 for
    tokens that cannot be part of an answer."""

    question: int
    row: Row
    spans: npt.NDArray[np.int32]


def cut_for(seq: int, row: Mapping[str, Any]) -> Cut:
    """The catalog's cut, or a smaller one where sequences are short: question and overlap get a third each at most."""
    length = min(seq, int(row["max_length"]))
    return Cut(
        length=length,
        overlap=min(int(row["doc_stride"]), length // 3),
        question=min(int(row["max_query"]), length // 3),
        answer=int(row["max_answer"]),
        n_best=int(row["n_best"]),
    )


class Squad(RowBatches):
    """Questions answered by a model's own head. Implements ``Task``; its rows are windows, its examples questions."""

    metric = "f1"

    def __init__(self, request: Request, train: Sequence[Question], held_out: Sequence[Question]) -> None:
        from harness.encoders import weights_sha256

        row, model = request.row, request.model
        self.name = request.name
        self.cut = cut_for(min(request.seq or model.max_seq, model.max_seq), row)
        self.train = in_order(train, row["seed"])[: row["calibrate"]]
        self.held_out = in_order(held_out, row["seed"])
        self._row = row
        self._weights_sha256 = weights_sha256(model.module)
        self._tokens = Tokens(model)
        self._model = model
        self._windows: list[Window] = []
        self._cut_questions = 0

    @cached_property
    def fingerprint(self) -> str:
        """See ``Task``."""
        data = sha256_of([[one.question, one.context, *one.answers] for one in (*self.train, *self.held_out)])
        cut = [self.cut.length, self.cut.overlap, self.cut.question]
        return fingerprint_of(self.name, data, self._weights_sha256, self._tokens.sha256, cut)

    def examples(self, limit: int | None = None) -> Sequence[Question]:
        """See ``Task``."""
        return first(self.held_out, limit, self._row["limit"])

    def windows(self, limit: int | None = None) -> list[Window]:
        """The windows of these examples, a question's beside each other."""
        count = len(self.examples(limit))
        while self._cut_questions < count:
            start = self._cut_questions
            chunk = self.held_out[start : start + _CHUNK]
            self._windows += cut_windows(self._tokens.tokenizer, chunk, self.cut, start)
            self._cut_questions += len(chunk)
        return [window for window in self._windows if window.question < count]

    def size(self, limit: int | None = None) -> int:
        """See ``Task``."""
        return len(self.windows(limit))

    def calibration(self) -> Iterator[Batch]:
        """See ``Task``. The first window of each question: later ones hold no other kind of text."""
        windows = cut_windows(self._tokens.tokenizer, self.train, self.cut, 0)
        firsts = {window.question: window.row for window in reversed(windows)}
        rows = [firsts[index] for index in sorted(firsts)]
        for _indices, batch in self._tokens.bucketed(rows, self._row["calibrate_batch"]):
            yield batch

    def _held_out_rows(self, seq: int, limit: int | None) -> list[Row]:
        check_seq(self._model, seq)
        rows = [window.row for window in self.windows(limit)]
        longest = max(len(row["input_ids"]) for row in rows)
        if longest > seq:
            raise UsageError(f"task {self.name}: windows of {longest} tokens do not fit sequences of {seq}")
        return rows

    def outputs(self, module_output: Tensor, batch: Batch) -> Floats:
        """(B, length, 2): logits of an answer's first and last token, zero where there is padding."""
        mask = batch["attention_mask"].unsqueeze(-1).bool()
        logits: Floats = module_output.detach().float().masked_fill(~mask, 0.0).numpy()
        result = np.zeros((len(logits), self.cut.length, 2), dtype=np.float32)
        width = min(self.cut.length, logits.shape[1])  # what is cut off is padding
        result[:, :width] = logits[:, :width]
        return result

    def answers(self, outputs: Floats) -> list[str]:
        """The text that answers each question, by (n, length, 2) outputs of all windows of the first questions."""
        found: dict[int, list[tuple[float, int, int]]] = {}
        for window, logits in zip(self._windows_of(outputs), outputs, strict=True):
            spans = best_spans(logits[: len(window.spans)], window.spans, self.cut)
            found.setdefault(window.question, []).extend(spans)
        return [_best_text(self.held_out[index].context, found[index]) for index in sorted(found)]

    def _windows_of(self, outputs: Floats) -> list[Window]:
        """The windows that so many outputs belong to. TaskError where they end amid a question."""
        count = len(outputs)
        while len(self._windows) < count and self._cut_questions < len(self.held_out):
            self.windows(min(self._cut_questions + _CHUNK, len(self.held_out)))
        ends = len(self._windows) == count or (
            len(self._windows) > count and self._windows[count].question != self._windows[count - 1].question
        )
        if not ends:
            raise TaskError(f"task {self.name}: {count} outputs are not those of all windows of its first questions")
        return self._windows[:count]

    def judge(self, outputs: Floats, reference_outputs: Floats) -> Accuracy:
        """See ``Task``. The value is the mean F1 over questions; ``others`` has the exact matches."""
        check_outputs(self.name, outputs, reference_outputs, max(len(outputs), 1))
        texts, fp32_texts = self.answers(outputs), self.answers(reference_outputs)
        return paired_accuracy(
            "f1",
            self._scores(texts, scores.f1),
            self._scores(fp32_texts, scores.f1),
            np.array([one != other for one, other in zip(texts, fp32_texts, strict=True)]),
            outputs,
            reference_outputs,
            chance=0.0,
            others={
                "exact_match": float(self._scores(texts, scores.exact_match).mean()),
                "fp32_exact_match": float(self._scores(fp32_texts, scores.exact_match).mean()),
            },
        )

    def _scores(self, texts: Sequence[str], score: scores.Score) -> npt.NDArray[np.float64]:
        return np.array([score(text, one.answers) for text, one in zip(texts, self.held_out, strict=False)])

    def kept(self, outputs: Floats) -> dict[str, npt.NDArray[Any]]:
        """See ``Task``."""
        texts = self.answers(outputs)
        return {
            "answers": np.array(texts),
            "f1": self._scores(texts, scores.f1).astype(np.float32),
            "exact_match": self._scores(texts, scores.exact_match).astype(np.float32),
        }


def load(request: Request) -> Squad:
    """The task, its data read from ``request.data`` or the hub. AssetError where they are missing or damaged."""
    row = request.row
    location = request.data or str(row["hub"])
    train, held_out = (
        parse(request.name, location, files.read(request.name, location, None, splits, offline=request.offline))
        for splits in (row["train"], row["held_out"])
    )
    return Squad(request, train, held_out)


def parse(name: str, location: str, found: Sequence[Mapping[str, Any]]) -> list[Question]:
    """The questions of a split."""
    questions = []
    for number, fields in enumerate(found, start=1):
        try:
            texts = tuple(fields["answers"]["text"])
            one = Question(str(fields["id"]), fields["question"].strip(), fields["context"], texts)
        except (KeyError, TypeError, AttributeError) as error:
            raise AssetError(
                f"task {name}: {location}: row {number} has no id, question, context or answers with text"
            ) from error
        if not texts:
            raise AssetError(
                f"task {name}: {location}: question {one.id} has no answer; give SQuAD v1.1, where each has one"
            )
        questions.append(one)
    if not questions:
        raise AssetError(f"task {name}: {location} has no questions")
    return questions


def in_order(questions: Sequence[Question], seed: int) -> list[Question]:
    """The questions by a hash of seed and id, so that the first n are about many articles."""
    return sorted(questions, key=lambda one: hashlib.sha256(f"{seed}:{one.id}".encode()).digest())


# --- windows and answers ---------------------------------------------------------------------------------------------


def cut_windows(tokenizer: Any, questions: Sequence[Question], cut: Cut, start: int) -> list[Window]:
    """The windows of questions, the first of which has the number ``start``."""
    if not questions:
        return []
    encoded = tokenizer(
        [_shortened(tokenizer, one.question, cut.question) for one in questions],
        [one.context for one in questions],
        truncation="only_second",
        max_length=cut.length,
        stride=cut.overlap,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_token_type_ids=True,
    )
    windows = []
    for index, question in enumerate(encoded["overflow_to_sample_mapping"]):
        row = {name: encoded[name][index] for name in ("input_ids", "token_type_ids")}
        in_context = np.array([sequence == 1 for sequence in encoded.sequence_ids(index)])
        spans = np.where(in_context[:, None], np.array(encoded["offset_mapping"][index]), -1).astype(np.int32)
        windows.append(Window(start + question, row, spans))
    return windows


def _shortened(tokenizer: Any, question: str, longest: int) -> str:
    """The question's text up to its token number ``longest``."""
    offsets = tokenizer(question, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return question if len(offsets) <= longest else question[: offsets[longest - 1][1]]


def best_spans(logits: Floats, spans: npt.NDArray[np.int32], cut: Cut) -> list[tuple[float, int, int]]:
    """The window's valid answers as (score, first character, end): of the ``n_best`` likeliest starts and ends.

    Args:
        logits: (length, 2), of the answer's first and last token.
        spans: (length, 2), see ``Window``.
    """
    allowed = spans[:, 0] >= 0
    starts, ends = (
        [int(token) for token in np.argsort(-logits[:, side], kind="stable")[: cut.n_best] if allowed[token]]
        for side in (0, 1)
    )
    found = [
        (float(logits[first, 0]) + float(logits[last, 1]), int(spans[first, 0]), int(spans[last, 1]))
        for first in starts
        for last in ends
        if first <= last < first + cut.answer
    ]
    return sorted(found, key=lambda one: (-one[0], one[1], one[2]))[: cut.n_best]


def _best_text(context: str, found: Sequence[tuple[float, int, int]]) -> str:
    """The likeliest text with something in it; empty where no window had a valid answer."""
    for _, first_char, end in sorted(found, key=lambda one: (-one[0], one[1], one[2])):
        text = context[first_char:end].strip()
        if text:
            return text
    return ""
