"""What every task is made of: the protocol, batches of tokens, and outputs collected through a module or an engine."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from harness import assets
from harness.errors import HarnessError, UsageError
from harness.records import Accuracy

if TYPE_CHECKING:
    from torch import Tensor

    from harness.models import LoadedModel

    Batch = dict[str, Tensor]
    Forward = Callable[..., Tensor]

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
Row = Mapping[str, Sequence[int]]
T = TypeVar("T")

RAGGED_BATCH = 32
FORMAT = 1  # raise when what is cached would no longer be computed the same way
LIBRARIES = ("torch", "transformers", "tokenizers", "scikit-learn", "numpy")


class TaskError(HarnessError):
    """A model cannot be judged on a task: its outputs are not finite, or its FP32 baseline is unsound."""

    exit_code = 2


class Task(Protocol):
    """What the runner needs of a task. B is a batch's size, S its sequence length, D the size of an output."""

    @property
    def name(self) -> str:
        """As in the catalog."""

    @property
    def metric(self) -> str:
        """Name of the metric, larger is better."""

    @property
    def fingerprint(self) -> str:
        """Identifies weights, tokenizer, data and library versions: what a cached FP32 output depends on."""

    def calibration(self) -> Iterator[Batch]:
        """Batches of training texts, ragged: each as long as its longest text. Never held-out ones."""

    def examples(self, limit: int | None = None) -> Sequence[Any]:
        """The held-out examples that are judged, always in the same order."""

    def longest(self, seq: int, limit: int | None = None) -> int:
        """Tokens of the longest of these examples once cut to ``seq``."""

    def batches(self, batch: int, seq: int, limit: int | None = None) -> Iterator[tuple[Indices, Batch]]:
        """The examples as batches of exactly (batch, seq), with the indices of the examples in their first rows."""

    def ragged(self, seq: int, limit: int | None = None) -> Iterator[tuple[Indices, Batch]]:
        """The same examples, cut to ``seq`` alike, in batches of similar length with little padding."""

    def size(self, limit: int | None = None) -> int:
        """How many rows these examples make: one each, or as many as a long one has windows."""

    def outputs(self, module_output: Tensor, batch: Batch) -> Floats:
        """(B, D): what is kept of each row; of windows (B, W, 2), with zeros where there is padding."""

    def judge(self, outputs: Floats, reference_outputs: Floats) -> Accuracy:
        """Accuracy of (n, D) outputs of the first n rows, beside those of eager FP32."""

    def kept(self, outputs: Floats) -> dict[str, npt.NDArray[Any]]:
        """What is kept of each example in the store: its logits and its label, or its answer and its scores."""


@dataclass(frozen=True)
class Request:
    """What a task is made from.

    ``row`` is the catalog's. ``data`` is a folder or hub id instead of the row's own, ``labels`` the names of the
    model's classes in the order of its logits, ``seq`` the length that texts are cut to where that shapes the examples.
    """

    name: str
    row: Mapping[str, Any]
    model: LoadedModel
    offline: bool = False
    progress: assets.Progress | None = None
    data: str | None = None
    labels: tuple[str, ...] | None = None
    seq: int | None = None


class RowBatches(ABC):
    """Batches of held-out rows, which all tasks form alike. A task says what its rows and its tokens are."""

    _tokens: Tokens

    @abstractmethod
    def _held_out_rows(self, seq: int, limit: int | None) -> list[Row]:
        """The rows of the examples that are judged, cut to ``seq`` tokens."""

    def longest(self, seq: int, limit: int | None = None) -> int:
        """See ``Task``."""
        return max(len(row["input_ids"]) for row in self._held_out_rows(seq, limit))

    def batches(self, batch: int, seq: int, limit: int | None = None) -> Iterator[tuple[Indices, Batch]]:
        """See ``Task``. A last partial batch repeats its first row; outputs of the repetitions are to be dropped."""
        rows = self._held_out_rows(seq, limit)
        for start in range(0, len(rows), batch):
            chosen = rows[start : start + batch]
            indices = np.arange(start, start + len(chosen))
            yield indices, self._tokens.pad(chosen + chosen[:1] * (batch - len(chosen)), seq)

    def ragged(self, seq: int, limit: int | None = None) -> Iterator[tuple[Indices, Batch]]:
        """See ``Task``."""
        return self._tokens.bucketed(self._held_out_rows(seq, limit), RAGGED_BATCH)


class Tokens:
    """Texts to batches for one model: its tokenizer, and padding as the harness wants it."""

    def __init__(self, model: LoadedModel) -> None:
        tokenizer: Any = model.tokenizer
        self._tokenizer = tokenizer
        self._inputs = model.inputs
        config: Any = model.module.backbone.config
        pad = config.pad_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._pad_id = int(pad or 0)

    @property
    def tokenizer(self) -> Any:
        """The fast tokenizer itself."""
        return self._tokenizer

    @cached_property
    def sha256(self) -> str:
        """Identifies the tokenizer, without the truncation and padding that its last call left in it."""
        state = json.loads(self._tokenizer.backend_tokenizer.to_str())
        return sha256_of({key: value for key, value in state.items() if key not in ("truncation", "padding")})

    def rows(self, texts: Sequence[str], seq: int, pairs: Sequence[str] | None = None) -> list[Row]:
        """Ids and token types of each text, or pair of texts, special tokens included, cut to ``seq`` tokens."""
        second = None if pairs is None else list(pairs)
        encoded = self._tokenizer(list(texts), second, truncation=True, max_length=seq, return_token_type_ids=True)
        return [
            {"input_ids": ids, "token_type_ids": types}
            for ids, types in zip(encoded["input_ids"], encoded["token_type_ids"], strict=True)
        ]

    def bucketed(self, rows: Sequence[Row], batch: int) -> Iterator[tuple[Indices, Batch]]:
        """All rows in batches of at most ``batch`` of similar length, shortest first, with the rows' indices."""
        order = np.argsort([len(row["input_ids"]) for row in rows], kind="stable")
        for start in range(0, len(order), batch):
            indices = order[start : start + batch]
            chosen = [rows[index] for index in indices]
            yield indices, self.pad(chosen, max(len(row["input_ids"]) for row in chosen))

    def pad(self, rows: Sequence[Row], seq: int) -> Batch:
        """One batch of (len(rows), seq), padded at the end and masked."""
        import torch

        shape = (len(rows), seq)
        batch = {
            "input_ids": torch.full(shape, self._pad_id),
            "attention_mask": torch.zeros(shape, dtype=torch.int64),
            "token_type_ids": torch.zeros(shape, dtype=torch.int64),
        }
        for index, row in enumerate(rows):
            length = len(row["input_ids"])
            batch["input_ids"][index, :length] = torch.tensor(row["input_ids"])
            batch["token_type_ids"][index, :length] = torch.tensor(row["token_type_ids"])
            batch["attention_mask"][index, :length] = 1
        return {name: batch[name] for name in self._inputs}


def first(examples: Sequence[T], limit: int | None, default: int) -> Sequence[T]:
    """The first ``limit`` examples, or ``default`` of them. UsageError for less than one."""
    if limit is not None and limit < 1:
        raise UsageError(f"the limit of judged examples must be at least 1, not {limit}")
    return examples[: default if limit is None else limit]


def check_seq(model: LoadedModel, seq: int) -> None:
    """UsageError for sequences that the model cannot take."""
    if seq > model.max_seq:
        raise UsageError(f"model {model.name} takes at most {model.max_seq} tokens, not {seq}")


def check_outputs(name: str, outputs: Floats, reference_outputs: Floats, most: int) -> None:
    """TaskError for outputs that are not finite, or of another number than the reference's, at most ``most``."""
    if outputs.shape != reference_outputs.shape or not 0 < len(outputs) <= most:
        raise TaskError(
            f"task {name}: outputs of shape {outputs.shape} cannot be judged beside a reference of shape "
            f"{reference_outputs.shape}; collect both for the same examples"
        )
    finite = np.isfinite(outputs).all(axis=tuple(range(1, outputs.ndim)))
    if not finite.all():
        raise TaskError(
            f"task {name}: the outputs of {int((~finite).sum())} of {len(outputs)} examples are not finite; "
            "look at the recipe's scales"
        )


def fingerprint_of(*parts: Any) -> str:
    """A task's fingerprint: a hash of what is particular to it, of the cache's format and of library versions."""
    return sha256_of([FORMAT, list(parts), {name: version(name) for name in LIBRARIES}])


def sha256_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def safe(name: str) -> str:
    """A name that can be part of a file's name."""
    return "".join(char if char.isalnum() or char in "-._" else "_" for char in name)[-60:]


# --- running ---------------------------------------------------------------------------------------------------------


def evaluate(task: Task, forward: Forward, batch: int, seq: int, limit: int | None = None) -> Floats:
    """(n, D) outputs of the held-out examples through ``forward(**batch)``, at exactly (batch, seq): the shape that was
    timed is the shape that is judged."""
    return collect(task, forward, task.batches(batch, seq, limit), task.size(limit))


def reference(
    model: LoadedModel, task: Task, cache: Path | None = None, *, seq: int, limit: int | None = None
) -> Floats:
    """(n, D) outputs of eager FP32 for the same examples, cut to ``seq`` alike; computed once and kept on disk.

    The batch's size does not matter to eager FP32, which is checked before (``check_padding_invariance``), so they are
    computed in buckets of similar length. ``cache`` is a folder, by default the one below the assets.
    """
    longest, count = task.longest(seq, limit), task.size(limit)
    stem = f"reference-{task.name}-{safe(model.name)}-s{longest}-n{count}-{task.fingerprint[:16]}"

    def compute() -> assets.Arrays:
        check_padding_invariance(model, task)
        with plain_fp32():
            return {"outputs": collect(task, model.module, task.ragged(seq, limit), count)}

    return assets.cached_arrays(stem, compute, cache)["outputs"]


def check_padding_invariance(model: LoadedModel, task: Task, *, count: int = 16, tolerance: float = 1e-3) -> float:
    """How much padding changes the FP32 outputs of the first ``count`` examples; TaskError above ``tolerance``.

    Each example alone and unpadded against all of them in one padded batch. The figure is the largest difference over
    the root mean square of the outputs. A model that heeds its mask shows rounding only (below 1e-5 as a rule); if it
    does not, every accuracy under another batch shape means nothing.
    """
    longest = task.longest(model.max_seq, count)
    padded_seq = min(longest + 8, model.max_seq)
    total = task.size(count)
    with plain_fp32():
        alone = collect(task, model.module, task.batches(1, longest, count), total, trim=True)
        together = collect(task, model.module, task.batches(total, padded_seq, count), total)
    scale = float(np.sqrt(np.mean(alone.astype(np.float64) ** 2))) or 1.0
    deviation = float(np.abs(alone - together).max()) / scale
    if not deviation <= tolerance:
        raise TaskError(
            f"model {model.name} is unsound in FP32: padding changes its outputs on {task.name} by {deviation:.2g} "
            f"of their size (allowed {tolerance:.0e}); check that it heeds attention_mask before judging INT8"
        )
    return deviation


@contextmanager
def plain_fp32() -> Iterator[None]:
    """No autocast, whatever the caller's engine has switched on."""
    import torch

    with torch.autocast("cpu", enabled=False):
        yield


def collect(
    task: Task, forward: Forward, batches: Iterator[tuple[Indices, Batch]], count: int, *, trim: bool = False
) -> Floats:
    """(count, D) outputs, each in its example's place. ``trim`` cuts the columns that are padding in all rows."""
    import torch

    result: Floats | None = None
    with torch.no_grad():
        for indices, batch in batches:
            inputs = _trimmed(batch) if trim else batch
            rows = task.outputs(forward(**inputs), inputs)[: len(indices)]
            if result is None:
                result = np.empty((count, *rows.shape[1:]), dtype=np.float32)
            result[indices] = rows
    if result is None:
        raise TaskError(f"task {task.name} has no examples to judge")
    return result


def _trimmed(batch: Batch) -> Batch:
    length = int(batch["attention_mask"].sum(1).max())
    return {name: tensor[:, :length] for name, tensor in batch.items()}
