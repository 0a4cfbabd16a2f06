"""Tasks ``sst2`` and ``mnli``: sentences, or pairs of them, classified by the checkpoint's own head."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness import stats
from harness.errors import AssetError, UsageError
from harness.records import Accuracy
from harness.tasks import files
from harness.tasks.base import (
    Floats,
    Indices,
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
from harness.tasks.judging import paired_classes

if TYPE_CHECKING:
    from torch import Tensor

    from harness.tasks.base import Batch

#: A permutation of the classes that does better by less than this may do so by luck (p of McNemar's exact test).
_PERMUTED_P = 1e-6
#: Permutations are looked through up to this many classes.
_MOST_PERMUTED = 6
#: Letters that two names must share at their start to be one name, as "entail" and "entailment" do.
_PREFIX = 3


@dataclass(frozen=True)
class Sentences:
    """One or two sentences and their label, which counts the task's ``labels``."""

    texts: tuple[str, ...]
    label: int


class Classification(RowBatches):
    """Sentences classified by a model's own head. Implements ``Task``.

    Its classes are the task's, in the task's order, whatever the order of the model's logits: they are matched by name.
    """

    metric = "accuracy"

    def __init__(self, request: Request, train: Sequence[Sentences], held_out: Sequence[Sentences]) -> None:
        from harness.encoders import weights_sha256

        row, model = request.row, request.model
        config: Any = model.module.backbone.config
        self.name = request.name
        self.labels: tuple[str, ...] = tuple(row["labels"])
        self.order = label_order(model.name, request.labels or class_names(config), self.labels)
        self.train = in_order(train, row["seed"])[: row["calibrate"]]
        self.held_out = in_order(held_out, row["seed"])
        self._row = row
        self._weights_sha256 = weights_sha256(model.module)
        self._tokens = Tokens(model)
        self._model = model

    @cached_property
    def fingerprint(self) -> str:
        """See ``Task``."""
        data = sha256_of([[[*one.texts], one.label] for one in (*self.train, *self.held_out)])
        return fingerprint_of(self.name, data, self._weights_sha256, self._tokens.sha256, list(self.order))

    def examples(self, limit: int | None = None) -> Sequence[Sentences]:
        """See ``Task``."""
        return first(self.held_out, limit, self._row["limit"])

    def size(self, limit: int | None = None) -> int:
        """See ``Task``."""
        return len(self.examples(limit))

    def calibration(self) -> Iterator[Batch]:
        """See ``Task``."""
        rows = self._rows(self.train, self._model.max_seq)
        for _indices, batch in self._tokens.bucketed(rows, self._row["calibrate_batch"]):
            yield batch

    def outputs(self, module_output: Tensor, batch: Batch) -> Floats:
        """(B, C): logits of the task's classes, in its order."""
        logits: Floats = module_output.detach().float().numpy()[:, list(self.order)]
        return logits

    def judge(self, outputs: Floats, reference_outputs: Floats) -> Accuracy:
        """See ``Task``. TaskError also where another order of the classes fits FP32's predictions far better."""
        check_outputs(self.name, outputs, reference_outputs, len(self.held_out))
        labels = self._labels(len(outputs))
        expected = np.argmax(reference_outputs, axis=1)
        problem = permuted(expected, labels, self.labels)
        if problem is not None:
            raise TaskError(f"model {self._model.name} on {self.name}: {problem}")
        return paired_classes(np.argmax(outputs, axis=1), expected, labels, outputs, reference_outputs)

    def kept(self, outputs: Floats) -> dict[str, npt.NDArray[Any]]:
        """See ``Task``."""
        return {"logits": outputs, "labels": self._labels(len(outputs)).astype(np.int16)}

    def _labels(self, count: int) -> Indices:
        return np.array([one.label for one in self.held_out[:count]])

    def _held_out_rows(self, seq: int, limit: int | None) -> list[Row]:
        check_seq(self._model, seq)
        return self._rows(self.examples(limit), seq)

    def _rows(self, examples: Sequence[Sentences], seq: int) -> list[Row]:
        pairs = [one.texts[1] for one in examples] if len(examples[0].texts) == 2 else None
        return self._tokens.rows([one.texts[0] for one in examples], seq, pairs)


def load(request: Request) -> Classification:
    """The task, its data read from ``request.data`` or the hub. AssetError where they are missing or damaged."""
    row, name = request.row, request.name
    location = request.data or str(row["hub"])
    train, held_out = (
        parse(name, location, row, files.read(name, location, row["config"], splits, offline=request.offline))
        for splits in (row["train"], row["held_out"])
    )
    return Classification(request, train, held_out)


def parse(name: str, location: str, row: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> list[Sentences]:
    """The labelled rows of a split. Those whose annotators disagreed (label ``-`` or -1) are left out, as in GLUE."""
    if not found:
        raise AssetError(f"task {name}: {location} has no rows")
    texts = [_column(name, location, found[0], names) for names in row["texts"]]
    label = _column(name, location, found[0], row["label"])
    parsed = []
    for number, fields in enumerate(found, start=1):
        value = fields.get(label)
        if str(value).strip() in ("-", "-1"):
            continue
        parts = tuple(fields.get(column) for column in texts)
        if not all(isinstance(part, str) for part in parts):
            raise AssetError(f"task {name}: {location}: row {number} lacks {' or '.join(texts)}")
        parsed.append(Sentences(parts, _label(name, location, number, value, row["labels"])))  # type: ignore[arg-type]
    if not parsed:
        raise AssetError(f"task {name}: {location} has no labelled rows")
    return parsed


def _column(name: str, location: str, fields: Mapping[str, Any], names: Sequence[str]) -> str:
    found = next((column for column in names if column in fields), None)
    if found is None:
        raise AssetError(f"task {name}: {location} has no column {' or '.join(names)}; it has {', '.join(fields)}")
    return found


def _label(name: str, location: str, number: int, value: Any, labels: Sequence[str]) -> int:
    """A label written as its name or its number."""
    text = str(value).strip().casefold()
    if text in labels:
        return labels.index(text)
    if text.isdecimal() and int(text) < len(labels):
        return int(text)
    raise AssetError(f"task {name}: {location}: row {number} has the label {value!r}; known: {', '.join(labels)}")


def in_order(examples: Sequence[Sentences], seed: int) -> list[Sentences]:
    """The examples by a hash of seed and texts, so that the first n are no file's first topic."""
    return sorted(examples, key=lambda one: hashlib.sha256("\0".join((str(seed), *one.texts)).encode()).digest())


# --- order of classes ------------------------------------------------------------------------------------------------


def class_names(config: Any) -> tuple[str, ...]:
    """Names of a model's classes in the order of its logits, by transformers' configuration."""
    return tuple(str(config.id2label[index]) for index in range(len(config.id2label)))


def label_order(model: str, names: Sequence[str], labels: Sequence[str]) -> tuple[int, ...]:
    """For each of the task's labels the index of the model's class of that name.

    Checkpoints order the classes of one task differently, so an order is never assumed. Upper and lower case are the
    same, and a name may be cut short. UsageError where the names leave a doubt.
    """
    keys = ["".join(filter(str.isalnum, name.casefold())) for name in names]
    matches = [[index for index, key in enumerate(keys) if _same_name(key, label)] for label in labels]
    clear = len(names) == len(labels) and all(len(found) == 1 for found in matches)
    order = tuple(found[0] for found in matches) if clear else ()
    if len(set(order)) != len(labels):
        raise UsageError(
            f"model {model} has the classes {', '.join(names)}, and their names do not tell which are "
            f"{', '.join(labels)}; give labels = [...] in the order of its logits in the file that --sources gives"
        )
    return order


def _same_name(key: str, label: str) -> bool:
    return min(len(key), len(label)) >= _PREFIX and (key.startswith(label) or label.startswith(key))


def permuted(predicted: Indices, labels: Indices, names: Sequence[str]) -> str | None:
    """What is wrong if another order of the classes fits the labels far better than the model's own; else None.

    A sound model is at its best in its own order. FP32 predictions are looked at, so INT8 has no part in it.
    """
    count = len(names)
    if count > _MOST_PERMUTED:
        return None
    confusion = np.zeros((count, count), dtype=np.int64)
    np.add.at(confusion, (predicted, labels), 1)
    own = np.arange(count)
    best = max(itertools.permutations(range(count)), key=lambda order: int(confusion[own, list(order)].sum()))
    right, better = predicted == labels, np.array(best)[predicted] == labels
    gained, lost = int((better & ~right).sum()), int((right & ~better).sum())
    if gained <= lost or stats.mcnemar(gained, lost) > _PERMUTED_P:
        return None
    swaps = ", ".join(f"{names[a]} means {names[b]}" for a, b in enumerate(best) if a != b)
    return (
        f"its label order looks permuted: FP32 is right in {right.mean():.3f} of the examples, and in "
        f"{better.mean():.3f} if {swaps}; correct id2label in its config.json or give labels in the file of --sources"
    )
