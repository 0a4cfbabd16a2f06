"""Task ``reviews``: labelled texts, judged by a logistic head over the mean-pooled embedding."""

from __future__ import annotations

import bz2
import csv
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness import assets
from harness.errors import AssetError
from harness.records import Accuracy
from harness.tasks.base import (
    RAGGED_BATCH,
    Floats,
    Indices,
    Request,
    Row,
    RowBatches,
    Tokens,
    check_outputs,
    check_seq,
    collect,
    fingerprint_of,
    first,
    plain_fp32,
    safe,
    sha256_of,
)
from harness.tasks.judging import paired_classes

if TYPE_CHECKING:
    from torch import Tensor

    from harness.models import LoadedModel
    from harness.tasks.base import Batch


@dataclass(frozen=True)
class Example:
    """A labelled text. ``label`` counts the task's ``labels``."""

    text: str
    label: int


@dataclass(frozen=True)
class Split:
    """Sizes and seed of a task's split; see ``catalog/tasks.toml``. ``limit``: held-out examples judged by default."""

    seed: int
    train: int
    calibrate: int
    calibrate_batch: int
    limit: int


# --- texts -----------------------------------------------------------------------------------------------------------


def read_reviews(path: Path, labels: Sequence[str]) -> list[Example]:
    """The usable rows of a reviews corpus (CSV, bz2), once each, in no meaningful order.

    Rows of other categories (plots) and without text are left out. Texts that differ in spaces or case only are one
    example; one that occurs under two labels says nothing and is left out.
    """
    found: dict[str, tuple[str, set[int]]] = {}
    try:
        with bz2.open(path, "rt", encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                text = " ".join((row["text"] or "").split())
                if row["category"] in labels and text:
                    spelled, seen = found.setdefault(text.casefold(), (text, set()))
                    seen.add(labels.index(row["category"]))
                    found[text.casefold()] = (min(spelled, text), seen)
    except (OSError, EOFError, KeyError, ValueError, csv.Error) as error:
        raise AssetError(
            f"{path} is no reviews corpus ({error!r}); delete its folder and run `harness fetch`"
        ) from error
    return [Example(text, seen.pop()) for text, seen in found.values() if len(seen) == 1]


def generate_reviews(row: Mapping[str, Any]) -> list[Example]:
    """Lines of words that lean to their class without telling it each time; the same for the same row."""
    random = Random(row["seed"])
    words: Mapping[str, Sequence[str]] = row["words"]
    labels: Sequence[str] = row["labels"]
    found: dict[str, Example] = {}
    while len(found) < row["texts"]:
        label = len(found) % len(labels)
        length = row["min_words"] + int(random.random() * (row["max_words"] - row["min_words"] + 1))
        text = " ".join(_word(random, words, labels, label) for _ in range(length))
        found.setdefault(text, Example(text, label))
    return list(found.values())


def _word(random: Random, words: Mapping[str, Sequence[str]], labels: Sequence[str], label: int) -> str:
    """A neutral word half the time, else one of a class: in nine of ten cases the text's own."""
    if random.random() < 0.5:
        group = words["neutral"]
    else:
        own = random.random() < 0.9
        group = words[labels[label if own else (label + 1) % len(labels)]]
    return group[int(random.random() * len(group))]


def ordered(examples: Iterable[Example], seed: int) -> list[Example]:
    """The examples by a hash of seed and text: an order that the file's order does not touch."""
    return sorted(examples, key=lambda example: hashlib.sha256(f"{seed}:{example.text}".encode()).digest())


# --- reviews ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """A linear classifier over outputs: ``weight`` (classes, D) and ``bias`` (classes,), float64."""

    weight: npt.NDArray[np.float64]
    bias: npt.NDArray[np.float64]

    def logits(self, outputs: Floats) -> npt.NDArray[np.float64]:
        """(n, classes) of (n, D) outputs."""
        found: npt.NDArray[np.float64] = outputs.astype(np.float64) @ self.weight.T + self.bias
        return found

    def predict(self, outputs: Floats) -> Indices:
        """(n,) class of each row of (n, D) outputs."""
        classes: Indices = np.argmax(self.logits(outputs), axis=1)
        return classes


class Reviews(RowBatches):
    """Texts classified by a logistic head over the mean-pooled embedding. Implements ``Task``."""

    metric = "accuracy"

    def __init__(self, name: str, examples: Sequence[Example], split: Split, model: LoadedModel) -> None:
        from harness.encoders import weights_sha256

        in_order = ordered(examples, split.seed)
        self.name = name
        self.split = split
        self.train = in_order[: split.train]
        self.held_out = in_order[split.train :]
        self.data_sha256 = sha256_of([[example.label, example.text] for example in in_order])
        self.weights_sha256 = weights_sha256(model.module)
        self._tokens = Tokens(model)
        self._model = model

    @property
    def fingerprint(self) -> str:
        """See ``Task``."""
        return fingerprint_of(self.name, self.data_sha256, self.weights_sha256, self._tokens.sha256, asdict(self.split))

    def examples(self, limit: int | None = None) -> Sequence[Example]:
        """See ``Task``. ``limit`` None is the catalog's; a larger one than there are gives all."""
        return first(self.held_out, limit, self.split.limit)

    def calibration(self) -> Iterator[Batch]:
        """See ``Task``."""
        rows = self._tokens.rows([example.text for example in self.train[: self.split.calibrate]], self._model.max_seq)
        for _indices, batch in self._tokens.bucketed(rows, self.split.calibrate_batch):
            yield batch

    def size(self, limit: int | None = None) -> int:
        """See ``Task``."""
        return len(self.examples(limit))

    def _held_out_rows(self, seq: int, limit: int | None) -> list[Row]:
        check_seq(self._model, seq)
        return self._tokens.rows([example.text for example in self.examples(limit)], seq)

    def outputs(self, module_output: Tensor, batch: Batch) -> Floats:
        """(B, H): mean over the tokens that the mask keeps of (B, S, H) hidden states."""
        hidden = module_output.detach().double()
        mask = batch["attention_mask"].to(hidden.dtype).unsqueeze(-1)
        pooled: Floats = ((hidden * mask).sum(1) / mask.sum(1)).float().numpy()
        return pooled

    def judge(self, outputs: Floats, reference_outputs: Floats) -> Accuracy:
        """See ``Task``. TaskError for outputs that are not finite, or of another number than the reference's."""
        check_outputs(self.name, outputs, reference_outputs, len(self.held_out))
        labels = np.array([example.label for example in self.held_out[: len(outputs)]])
        predicted, expected = self.head.predict(outputs), self.head.predict(reference_outputs)
        return paired_classes(predicted, expected, labels, outputs, reference_outputs)

    def kept(self, outputs: Floats) -> dict[str, npt.NDArray[Any]]:
        """See ``Task``."""
        labels = [example.label for example in self.examples(len(outputs))]
        logits = self.head.logits(outputs).astype(np.float32)
        return {"logits": logits, "labels": np.array(labels, dtype=np.int16)}

    @cached_property
    def head(self) -> Head:
        """The head, trained on eager FP32 outputs of the training texts the first time anyone needs it."""
        stem = f"head-{self.name}-{safe(self._model.name)}-{self.fingerprint[:16]}"
        stored = assets.cached_arrays(stem, self._train_head)
        return Head(stored["weight"], stored["bias"])

    def _train_head(self) -> assets.Arrays:
        """Weight and bias of a logistic regression, with the seed and the data's hash that they came from."""
        from sklearn.linear_model import LogisticRegression

        rows = self._tokens.rows([example.text for example in self.train], self._model.max_seq)
        with plain_fp32():
            embeddings = collect(self, self._model.module, self._tokens.bucketed(rows, RAGGED_BATCH), len(rows))
        labels = [example.label for example in self.train]
        regression = LogisticRegression(max_iter=5000, random_state=self.split.seed)
        fitted = regression.fit(embeddings.astype(np.float64), labels)
        weight, bias = fitted.coef_, fitted.intercept_
        if len(weight) == 1:  # two classes: scikit-learn keeps the row of the second alone
            weight, bias = np.vstack([np.zeros_like(weight), weight]), np.concatenate([np.zeros_like(bias), bias])
        about = json.dumps({"seed": self.split.seed, "data_sha256": self.data_sha256, "n": len(labels)})
        return {"weight": weight, "bias": bias, "about": np.array(about)}


# --- loaders ---------------------------------------------------------------------------------------------------------


def _split(row: Mapping[str, Any]) -> Split:
    return Split(row["seed"], row["train"], row["calibrate"], row["calibrate_batch"], row["limit"])


def load_reviews(request: Request) -> Reviews:
    """The task on an asset's texts."""
    row = request.row
    folder = assets.ensure(row["asset"], offline=request.offline, progress=request.progress)
    return Reviews(request.name, read_reviews(folder / row["file"], row["labels"]), _split(row), request.model)


def load_generated(request: Request) -> Reviews:
    """The task on generated texts, for tests."""
    return Reviews(request.name, generate_reviews(request.row), _split(request.row), request.model)
