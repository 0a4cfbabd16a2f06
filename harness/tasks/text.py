"""Task ``text``: a causal model's perplexity on plain text, for models of the OPT family and their like.

The text is cut into windows of exactly the scenario's length that do not overlap; each token but a window's first is
predicted from those before it. The metric, larger is better as everywhere, is the geometric mean of the probabilities
that the model gives the true tokens of a window, averaged over windows; beside it stands the text's perplexity.
A prediction has changed where a token is no longer the likeliest, or has become it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.errors import AssetError, UsageError
from harness.records import Accuracy
from harness.tasks import files
from harness.tasks.base import (
    Floats,
    Request,
    Row,
    RowBatches,
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

_NAMES = ("train.txt", "calibration.txt"), ("test.txt", "validation.txt")


@dataclass(frozen=True)
class Window:
    """Token ids of one stretch of text."""

    ids: tuple[int, ...]


class Text(RowBatches):
    """Windows of a text, each token predicted from those before it. Implements ``Task``."""

    metric = "token_probability"

    def __init__(self, request: Request, train: str, held_out: str) -> None:
        from harness.encoders import weights_sha256

        row, model = request.row, request.model
        self.name = request.name
        self.seq = min(request.seq or int(row["seq"]), model.max_seq)
        self._tokens = Tokens(model)
        self._model = model
        self._row = row
        self._weights_sha256 = weights_sha256(model.module)
        self.train = self._windows(train, int(row["calibrate"]), "to calibrate on")
        self.held_out = self._windows(held_out, None, "to judge")

    def _windows(self, text: str, count: int | None, purpose: str) -> list[Window]:
        """Windows of the text in an order of their own, so that the first ones come from everywhere in it."""
        ids: list[int] = self._tokens.tokenizer(text, add_special_tokens=False)["input_ids"]
        start = self._tokens.tokenizer.bos_token_id
        lead, step = ([start], self.seq - 1) if start is not None else ([], self.seq)
        found = [Window((*lead, *ids[at : at + step])) for at in range(0, len(ids) - step + 1, step)]
        if not found:
            raise AssetError(
                f"task {self.name}: {len(ids)} tokens {purpose} are less than one window of {self.seq}; "
                "give a longer text, or a scenario with a shorter s"
            )
        Random(int(self._row["seed"])).shuffle(found)
        return found[:count]

    @cached_property
    def fingerprint(self) -> str:
        """See ``Task``."""
        data = sha256_of([one.ids for one in (*self.train, *self.held_out)])
        return fingerprint_of(self.name, data, self._weights_sha256, self._tokens.sha256, self.seq)

    def examples(self, limit: int | None = None) -> Sequence[Window]:
        """See ``Task``."""
        return first(self.held_out, limit, int(self._row["limit"]))

    def calibration(self) -> Iterator[Batch]:
        """See ``Task``."""
        size = int(self._row["calibrate_batch"])
        for start in range(0, len(self.train), size):
            chosen = self.train[start : start + size]
            yield self._tokens.pad([_row(one, self.seq) for one in chosen], self.seq)

    def size(self, limit: int | None = None) -> int:
        """See ``Task``."""
        return len(self.examples(limit))

    def _held_out_rows(self, seq: int, limit: int | None) -> list[Row]:
        check_seq(self._model, seq)
        return [_row(one, seq) for one in self.examples(limit)]

    def outputs(self, module_output: Tensor, batch: Batch) -> Floats:
        """(B, seq - 1, 2) of (B, S, V) logits: each next token's log-probability, and 1 if it is the likeliest."""
        import torch

        logits, ids = module_output.detach().float()[:, : self.seq - 1], batch["input_ids"][:, 1 : self.seq]
        given = torch.log_softmax(logits, dim=-1).gather(-1, ids[..., None]).squeeze(-1)
        hit = (logits.argmax(dim=-1) == ids).float()
        result: Floats = torch.stack([given, hit], dim=-1).numpy()
        return result

    def judge(self, outputs: Floats, reference_outputs: Floats) -> Accuracy:
        """See ``Task``."""
        check_outputs(self.name, outputs, reference_outputs, len(self.held_out))
        others = {"perplexity": perplexity(outputs), "fp32_perplexity": perplexity(reference_outputs)}
        return paired_accuracy(
            self.metric,
            _mean_probability(outputs),
            _mean_probability(reference_outputs),
            (outputs[..., 1] != reference_outputs[..., 1]).reshape(-1),
            outputs[..., 0],
            reference_outputs[..., 0],
            chance=1.0 / self._model.vocab_size,
            others=others,
        )

    def kept(self, outputs: Floats) -> dict[str, npt.NDArray[Any]]:
        """See ``Task``."""
        return {"log_probability": outputs[..., 0].sum(axis=1).astype(np.float32)}


def _row(window: Window, seq: int) -> dict[str, list[int]]:
    ids = list(window.ids[:seq])
    return {"input_ids": ids, "token_type_ids": [0] * len(ids)}


def _mean_probability(outputs: Floats) -> npt.NDArray[np.float64]:
    """(n,) geometric mean of the true tokens' probabilities in each window."""
    found: npt.NDArray[np.float64] = np.exp(outputs[..., 0].astype(np.float64).mean(axis=1))
    return found


def perplexity(outputs: Floats) -> float:
    """exp of the mean negative log-probability over all tokens of (n, seq - 1, 2) outputs."""
    return float(np.exp(-outputs[..., 0].astype(np.float64).mean()))


def load(request: Request) -> Text:
    """The task on a text file, a folder with ``train.txt`` and ``test.txt``, or a hub's data set of texts.

    A single file gives both: its first tenth calibrates and is not judged.

    Raises:
        UsageError: no data is named, or the model has no head that predicts tokens.
        AssetError: the text is missing, or shorter than one window.
    """
    if request.data is None:
        raise UsageError(
            f'task {request.name} needs a text: write {request.name} = "FILE" below [tasks] in the file of --sources'
        )
    train, held_out = _texts(request, request.data)
    return Text(request, train, held_out)


def _texts(request: Request, location: str) -> tuple[str, str]:
    path = Path(location)
    if path.is_file():
        text = _read(path)
        end = text.rfind(" ", 0, max(1, len(text) // 10)) + 1 or len(text) // 10
        return text[:end], text[end:]
    if path.is_dir():
        found = [next((path / name for name in names if (path / name).is_file()), None) for names in _NAMES]
        train, held_out = found
        if train is not None and held_out is not None:
            return _read(train), _read(held_out)
    row: Mapping[str, Any] = request.row
    splits = (
        files.read(request.name, location, row.get("config"), row[split], offline=request.offline)
        for split in ("train", "held_out")
    )
    train_text, held_out_text = ("\n".join(str(one.get("text", "")) for one in rows) for rows in splits)
    return train_text, held_out_text


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AssetError(f"cannot read {path}: {error}; give a text file in UTF-8") from error
