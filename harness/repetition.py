"""Predictions of a cell beside those that it made in an earlier run: docs/gates.md, "Accuracy", ``flips_previous``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from harness import verdicts
from harness.errors import HarnessError
from harness.history import RunEntry
from harness.records import Run, RunHeader, Store
from harness.verdicts import Repetition, Rules, Verdict

if TYPE_CHECKING:
    from numpy.typing import NDArray

Arrays = Mapping[str, "NDArray[Any]"]


def judge(
    store: Store, run: Run, where: Mapping[str, tuple[RunEntry, int]], rules: Rules | None = None
) -> tuple[dict[str, list[Verdict]], list[str]]:
    """Verdicts ``flips_previous`` by cell key, against the runs ``where`` that each cell is compared with; and notes on
    what could not be compared.

    One prepared model serves several cells and is judged once: they share a file, which is read once.
    """
    found: dict[str, list[Verdict]] = {}
    missing: dict[str, int] = {}
    reader = _Reader(store)
    for key, record in verdicts.latest(run).items():
        outputs = record.accuracy.outputs if record.accuracy else None
        before = where.get(key)
        if record.status != "ok" or outputs is None or before is None:
            continue
        entry, place = before
        earlier = entry.outputs[place]
        if earlier is None or earlier == outputs:
            continue
        counted = reader.changed(outputs, earlier)
        if isinstance(counted, str):
            missing[counted] = missing.get(counted, 0) + 1
            continue
        repetition = Repetition(entry.run_id, *counted, same=is_repeat(run.header, entry.header))
        gated = verdicts.is_gated(record.cell, run.header)
        found[key] = [verdicts.judge_repetition(key, repetition, gated, rules)]
    return found, [f"predictions of {count} cells were not compared: {why}" for why, count in missing.items()]


def is_repeat(one: RunHeader, other: RunHeader) -> bool:
    """True if nothing that should matter lies between two runs: one known commit without changes, the same versions."""
    clean = one.dirty is False and other.dirty is False and one.commit is not None
    return clean and one.commit == other.commit and one.versions == other.versions


def predictions(arrays: Arrays) -> NDArray[Any] | None:
    """(n,) what was predicted for each example: the class, or the answer; None for other outputs."""
    if "answers" in arrays:
        return arrays["answers"]
    logits = arrays.get("logits")
    return None if logits is None or logits.ndim != 2 else np.argmax(logits, axis=1)


class _Reader:
    """Reads each pair of files once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[tuple[str, str], tuple[int, int] | str] = {}

    def changed(self, outputs: str, earlier: str) -> tuple[int, int] | str:
        """Examples, and how many of them changed; or why that cannot be told."""
        if (outputs, earlier) not in self._known:
            self._known[outputs, earlier] = self._compare(outputs, earlier)
        return self._known[outputs, earlier]

    def _compare(self, outputs: str, earlier: str) -> tuple[int, int] | str:
        try:
            now, before = self._store.outputs(outputs), self._store.outputs(earlier)
        except HarnessError:
            return "a file of predictions is not here or damaged"
        new, old = predictions(now), predictions(before)
        if new is None or old is None:
            return "their task keeps no predictions"
        if len(new) != len(old) or not _same_examples(now, before):
            return "other examples were judged"
        return len(new), int((new != old).sum())


def _same_examples(now: Arrays, before: Arrays) -> bool:
    labels = [one.get("labels") for one in (now, before)]
    return all(one is None for one in labels) or (
        labels[0] is not None and labels[1] is not None and np.array_equal(labels[0], labels[1])
    )
