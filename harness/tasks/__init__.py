"""Tasks: labelled texts, how they are split, and how a model's outputs become predictions and an accuracy.

A task belongs to one model, whose tokenizer cuts its texts and on whose FP32 outputs its head is trained. Everything
that is judged is judged on paired examples: the same texts, truncated alike, through eager FP32 and through the engine.
Importing this package does not import torch.

To add a task, write a class with the methods of ``Task``, register its loader in ``KINDS``, and give it a row in
``catalog/tasks.toml``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from harness import assets, models
from harness.errors import UsageError
from harness.tasks import glue, squad, text
from harness.tasks.base import (
    Floats,
    Indices,
    Request,
    Task,
    TaskError,
    Tokens,
    check_padding_invariance,
    evaluate,
    reference,
)
from harness.tasks.judging import at_chance, mean_cosine, paired_accuracy, paired_classes, sqnr_db
from harness.tasks.reviews import (
    Example,
    Head,
    Reviews,
    Split,
    generate_reviews,
    load_generated,
    load_reviews,
    ordered,
    read_reviews,
)

if TYPE_CHECKING:
    from harness.models import LoadedModel

__all__ = [
    "KINDS",
    "Example",
    "Floats",
    "Head",
    "Indices",
    "Request",
    "Reviews",
    "Split",
    "Task",
    "TaskError",
    "Tokens",
    "at_chance",
    "check_padding_invariance",
    "evaluate",
    "generate_reviews",
    "head_of",
    "known",
    "load",
    "mean_cosine",
    "ordered",
    "paired_accuracy",
    "paired_classes",
    "read_reviews",
    "reference",
    "sqnr_db",
    "unsupported",
]


def known(*, hidden: bool = False) -> tuple[str, ...]:
    """Names of the catalog's tasks; the hidden ones of tests only if asked for."""
    return tuple(name for name, row in assets.catalog("tasks").items() if hidden or not row.get("hidden", False))


def unsupported(task_name: str, model_name: str) -> str | None:
    """Why a model of the catalog cannot be judged on a task, or None. UsageError for unknown names."""
    head = head_of(task_name)
    row = models.info(model_name)
    if row is not None and head is not None:
        return f"model {model_name} has no head for task {task_name}: name a checkpoint with --sources"
    if row is not None and row.weights == "synthetic" and "words" not in assets.catalog("models")[model_name]:
        return f"model {model_name} has synthetic weights: it is measured for speed only"
    return None


def head_of(task_name: str) -> models.Head | None:
    """The head that a model needs for a task; None where the task trains one. UsageError for unknown names."""
    if task_name not in known(hidden=True):
        raise UsageError(assets.nearest("task", task_name, known()))
    head: models.Head | None = assets.catalog("tasks")[task_name].get("head")
    return head


def load(
    task_name: str,
    model: LoadedModel,
    *,
    offline: bool = False,
    progress: assets.Progress | None = None,
    data: str | None = None,
    labels: tuple[str, ...] | None = None,
    seq: int | None = None,
) -> Task:
    """The task for a model.

    ``data`` is a folder or hub id instead of the catalog's. ``labels`` names the model's classes in the order of its
    logits, instead of its configuration. ``seq`` is the length in tokens that examples will be cut to, for tasks that
    read long texts in windows. Raises UsageError for an unknown task, a model without a tokenizer or without names of
    its classes, AssetError for data that is missing or damaged.
    """
    head_of(task_name)  # a wrong name is said first
    if model.tokenizer is None:
        raise UsageError(
            f"task {task_name} cannot judge model {model.name}: it has no tokenizer"
            + (" and synthetic weights (speed only)" if model.weights == "synthetic" else "; put one in its folder")
        )
    row = assets.catalog("tasks")[task_name]
    return KINDS[row["kind"]](Request(task_name, row, model, offline, progress, data, labels, seq))


Loader = Callable[[Request], Task]

KINDS: dict[str, Loader] = {
    "reviews": load_reviews,
    "generated": load_generated,
    "glue": glue.load,
    "squad": squad.load,
    "text": text.load,
}
