"""Tasks: labelled texts, how they are split, and how a model's outputs become predictions and an accuracy.

A task belongs to one model, whose tokenizer cuts its texts and on whose FP32 outputs its head is trained. Everything
that is judged is judged on paired examples: the same texts, truncated alike, through eager FP32 and through the engine.
Importing this module does not import torch.

To add a task, write a class with the methods of ``Task``, register its loader in ``KINDS``, and give it a row in
``catalog/tasks.toml``.
"""

from __future__ import annotations

import bz2
import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from harness import assets, models
from harness.errors import AssetError, HarnessError, UsageError
from harness.records import Accuracy

if TYPE_CHECKING:
    from torch import Tensor

    from harness.models import LoadedModel

    Batch = dict[str, Tensor]
    Forward = Callable[..., Tensor]

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]

RESAMPLES = 10_000
_BOOTSTRAP_SEED = 20240607
_RAGGED_BATCH = 32
_FORMAT = 1  # raise when what is cached would no longer be computed the same way
_LIBRARIES = ("torch", "transformers", "tokenizers", "scikit-learn", "numpy")


class TaskError(HarnessError):
    """A model cannot be judged on a task: its outputs are not finite, or its FP32 baseline is unsound."""

    exit_code = 2


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

    def outputs(self, module_output: Tensor, batch: Batch) -> Floats:
        """(B, D): what is kept of each example."""

    def judge(self, outputs: Floats, reference_outputs: Floats) -> Accuracy:
        """Accuracy of (n, D) outputs of the first n examples, beside those of eager FP32."""


def known(*, hidden: bool = False) -> tuple[str, ...]:
    """Names of the catalog's tasks; the hidden ones of tests only if asked for."""
    return tuple(name for name, row in assets.catalog("tasks").items() if hidden or not row.get("hidden", False))


def unsupported(task_name: str, model_name: str) -> str | None:
    """Why a model of the catalog cannot be judged on a task, or None. UsageError for unknown names."""
    if task_name not in known(hidden=True):
        raise UsageError(assets.nearest("task", task_name, known()))
    row = models.info(model_name)
    if row is not None and row.weights == "synthetic" and "words" not in assets.catalog("models")[model_name]:
        return f"model {model_name} has synthetic weights: it is measured for speed only"
    return None


def load(task_name: str, model: LoadedModel, *, offline: bool = False, progress: assets.Progress | None = None) -> Task:
    """The task for a model. Raises UsageError for an unknown task or a model without a tokenizer, AssetError for data
    that is missing or damaged."""
    if task_name not in known(hidden=True):
        raise UsageError(assets.nearest("task", task_name, known()))
    if model.tokenizer is None:
        raise UsageError(
            f"task {task_name} cannot judge model {model.name}: it has no tokenizer"
            + (" and synthetic weights (speed only)" if model.weights == "synthetic" else "; put one in its folder")
        )
    row = assets.catalog("tasks")[task_name]
    return KINDS[row["kind"]](task_name, row, model, offline, progress)


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

    def predict(self, outputs: Floats) -> Indices:
        """(n,) class of each row of (n, D) outputs."""
        classes: Indices = np.argmax(outputs.astype(np.float64) @ self.weight.T + self.bias, axis=1)
        return classes


class Reviews:
    """Texts classified by a logistic head over the mean-pooled embedding. Implements ``Task``."""

    metric = "accuracy"

    def __init__(self, name: str, examples: Sequence[Example], split: Split, model: LoadedModel) -> None:
        from harness.encoders import weights_sha256

        in_order = ordered(examples, split.seed)
        self.name = name
        self.split = split
        self.train = in_order[: split.train]
        self.held_out = in_order[split.train :]
        self.data_sha256 = _sha256([[example.label, example.text] for example in in_order])
        self.weights_sha256 = weights_sha256(model.module)
        self._tokens = Tokens(model)
        self._model = model

    @property
    def fingerprint(self) -> str:
        """See ``Task``."""
        parts = [self.name, self.data_sha256, self.weights_sha256, self._tokens.sha256, asdict(self.split)]
        return _sha256([_FORMAT, parts, {name: version(name) for name in _LIBRARIES}])

    def examples(self, limit: int | None = None) -> Sequence[Example]:
        """See ``Task``. ``limit`` None is the catalog's; a larger one than there are gives all."""
        if limit is not None and limit < 1:
            raise UsageError(f"the limit of judged examples must be at least 1, not {limit}")
        return self.held_out[: self.split.limit if limit is None else limit]

    def calibration(self) -> Iterator[Batch]:
        """See ``Task``."""
        rows = self._tokens.rows([example.text for example in self.train[: self.split.calibrate]], self._model.max_seq)
        for _indices, batch in self._tokens.bucketed(rows, self.split.calibrate_batch):
            yield batch

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
        return self._tokens.bucketed(self._held_out_rows(seq, limit), _RAGGED_BATCH)

    def _held_out_rows(self, seq: int, limit: int | None) -> list[Row]:
        if seq > self._model.max_seq:
            raise UsageError(f"model {self._model.name} takes at most {self._model.max_seq} tokens, not {seq}")
        return self._tokens.rows([example.text for example in self.examples(limit)], seq)

    def outputs(self, module_output: Tensor, batch: Batch) -> Floats:
        """(B, H): mean over the tokens that the mask keeps of (B, S, H) hidden states."""
        hidden = module_output.detach().double()
        mask = batch["attention_mask"].to(hidden.dtype).unsqueeze(-1)
        pooled: Floats = ((hidden * mask).sum(1) / mask.sum(1)).float().numpy()
        return pooled

    def judge(self, outputs: Floats, reference_outputs: Floats) -> Accuracy:
        """See ``Task``. TaskError for outputs that are not finite, or of another number than the reference's."""
        count = len(reference_outputs)
        if outputs.shape != reference_outputs.shape or not 0 < count <= len(self.held_out):
            raise TaskError(
                f"task {self.name}: outputs of shape {outputs.shape} cannot be judged beside a reference of shape "
                f"{reference_outputs.shape}; collect both for the same examples"
            )
        finite = np.isfinite(outputs).all(axis=1)
        if not finite.all():
            raise TaskError(
                f"task {self.name}: the outputs of {int((~finite).sum())} of {count} examples are not finite; "
                "look at the recipe's scales"
            )
        labels = np.array([example.label for example in self.held_out[:count]])
        predicted, expected = self.head.predict(outputs), self.head.predict(reference_outputs)
        return paired_accuracy(predicted, expected, labels, outputs, reference_outputs)

    @cached_property
    def head(self) -> Head:
        """The head, trained on eager FP32 outputs of the training texts the first time anyone needs it."""
        stem = f"head-{self.name}-{_safe(self._model.name)}-{self.fingerprint[:16]}"
        stored = assets.cached_arrays(stem, self._train_head)
        return Head(stored["weight"], stored["bias"])

    def _train_head(self) -> assets.Arrays:
        """Weight and bias of a logistic regression, with the seed and the data's hash that they came from."""
        from sklearn.linear_model import LogisticRegression

        rows = self._tokens.rows([example.text for example in self.train], self._model.max_seq)
        with _plain_fp32():
            embeddings = _run(self, self._model.module, self._tokens.bucketed(rows, _RAGGED_BATCH), len(rows))
        labels = [example.label for example in self.train]
        regression = LogisticRegression(max_iter=5000, random_state=self.split.seed)
        fitted = regression.fit(embeddings.astype(np.float64), labels)
        weight, bias = fitted.coef_, fitted.intercept_
        if len(weight) == 1:  # two classes: scikit-learn keeps the row of the second alone
            weight, bias = np.vstack([np.zeros_like(weight), weight]), np.concatenate([np.zeros_like(bias), bias])
        about = json.dumps({"seed": self.split.seed, "data_sha256": self.data_sha256, "n": len(labels)})
        return {"weight": weight, "bias": bias, "about": np.array(about)}


Row = Mapping[str, Sequence[int]]


class Tokens:
    """Texts to batches for one model: its tokenizer, and padding as the harness wants it."""

    def __init__(self, model: LoadedModel) -> None:
        tokenizer: Any = model.tokenizer
        self._tokenizer = tokenizer
        self._inputs = model.inputs
        config: Any = model.module.backbone.config
        pad = config.pad_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._pad_id = int(pad or 0)

    @cached_property
    def sha256(self) -> str:
        """Identifies the tokenizer, without the truncation and padding that its last call left in it."""
        state = json.loads(self._tokenizer.backend_tokenizer.to_str())
        return _sha256({key: value for key, value in state.items() if key not in ("truncation", "padding")})

    def rows(self, texts: Sequence[str], seq: int) -> list[Row]:
        """Ids and token types of each text, special tokens included, cut to ``seq`` tokens."""
        encoded = self._tokenizer(list(texts), truncation=True, max_length=seq, return_token_type_ids=True)
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


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _safe(name: str) -> str:
    """A name that can be part of a file's name."""
    return "".join(char if char.isalnum() or char in "-._" else "_" for char in name)[-60:]


# --- running and judging ---------------------------------------------------------------------------------------------


def evaluate(task: Task, forward: Forward, batch: int, seq: int, limit: int | None = None) -> Floats:
    """(n, D) outputs of the held-out examples through ``forward(**batch)``, at exactly (batch, seq): the shape that was
    timed is the shape that is judged."""
    return _run(task, forward, task.batches(batch, seq, limit), len(task.examples(limit)))


def reference(
    model: LoadedModel, task: Task, cache: Path | None = None, *, seq: int, limit: int | None = None
) -> Floats:
    """(n, D) outputs of eager FP32 for the same examples, cut to ``seq`` alike; computed once and kept on disk.

    The batch's size does not matter to eager FP32, which is checked before (``check_padding_invariance``), so they are
    computed in buckets of similar length. ``cache`` is a folder, by default the one below the assets.
    """
    longest, count = task.longest(seq, limit), len(task.examples(limit))
    stem = f"reference-{task.name}-{_safe(model.name)}-s{longest}-n{count}-{task.fingerprint[:16]}"

    def compute() -> assets.Arrays:
        check_padding_invariance(model, task)
        with _plain_fp32():
            return {"outputs": _run(task, model.module, task.ragged(seq, limit), count)}

    return assets.cached_arrays(stem, compute, cache)["outputs"]


def check_padding_invariance(model: LoadedModel, task: Task, *, count: int = 16, tolerance: float = 1e-3) -> float:
    """How much padding changes the FP32 outputs of the first ``count`` examples; TaskError above ``tolerance``.

    Each example alone and unpadded against all of them in one padded batch. The figure is the largest difference over
    the root mean square of the outputs. A model that heeds its mask shows rounding only (below 1e-5 as a rule); if it
    does not, every accuracy under another batch shape means nothing.
    """
    longest = task.longest(model.max_seq, count)
    padded_seq = min(longest + 8, model.max_seq)
    total = len(task.examples(count))
    with _plain_fp32():
        alone = _run(task, model.module, task.batches(1, longest, count), total, trim=True)
        together = _run(task, model.module, task.batches(total, padded_seq, count), total)
    scale = float(np.sqrt(np.mean(alone.astype(np.float64) ** 2))) or 1.0
    deviation = float(np.abs(alone - together).max()) / scale
    if not deviation <= tolerance:
        raise TaskError(
            f"model {model.name} is unsound in FP32: padding changes its outputs on {task.name} by {deviation:.2g} "
            f"of their size (allowed {tolerance:.0e}); check that it heeds attention_mask before judging INT8"
        )
    return deviation


@contextmanager
def _plain_fp32() -> Iterator[None]:
    """No autocast, whatever the caller's engine has switched on."""
    import torch

    with torch.autocast("cpu", enabled=False):
        yield


def _run(
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


# --- registry --------------------------------------------------------------------------------------------------------

Loader = Callable[[str, Mapping[str, Any], "LoadedModel", bool, "assets.Progress | None"], Task]


def _split(row: Mapping[str, Any]) -> Split:
    return Split(row["seed"], row["train"], row["calibrate"], row["calibrate_batch"], row["limit"])


def _load_reviews(
    name: str, row: Mapping[str, Any], model: LoadedModel, offline: bool, progress: assets.Progress | None
) -> Task:
    folder = assets.ensure(row["asset"], offline=offline, progress=progress)
    return Reviews(name, read_reviews(folder / row["file"], row["labels"]), _split(row), model)


def _load_generated(
    name: str, row: Mapping[str, Any], model: LoadedModel, _offline: bool, _progress: assets.Progress | None
) -> Task:
    return Reviews(name, generate_reviews(row), _split(row), model)


KINDS: dict[str, Loader] = {"reviews": _load_reviews, "generated": _load_generated}
