"""Streaming statistics of what a model's linears read.

Memory is O(features) a linear: extremes a channel and a bounded sample of token rows, whatever the number of tokens.
Padding is left out by the attention mask, lengths may differ from batch to batch, and a NaN or infinity in a real
token names the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from int8.errors import CalibrationError

Batch = Mapping[str, Tensor]

#: Token rows of a linear's input that are kept to measure output error: enough for a stable choice, a few MB at most.
SAMPLE_ROWS = 512


@dataclass
class ChannelStats:
    """Extremes of each input channel over all real tokens, and a uniform sample of the rows.

    Attributes:
        low, high: (K,) FP32, smallest and largest value of the channel.
        rows: number of tokens seen.
        sample: (at most SAMPLE_ROWS, K) rows, each token with the same chance (reservoir sampling, Vitter 1985).
    """

    low: Tensor
    high: Tensor
    rows: int = 0
    sample: Tensor = field(default_factory=lambda: torch.empty(0))

    @classmethod
    def empty(cls, features: int) -> ChannelStats:
        """Statistics of no rows over ``features`` channels."""
        infinity = torch.full((features,), float("inf"))
        return cls(infinity, -infinity, sample=torch.empty(0, features))

    @property
    def absmax(self) -> Tensor:
        """(K,) largest magnitude of each channel."""
        return torch.maximum(self.low.abs(), self.high.abs())

    def update(self, rows: Tensor, generator: torch.Generator) -> None:
        """Take in ``rows`` (T, K), finite."""
        value = rows.float()
        self.low = torch.minimum(self.low, value.amin(dim=0))
        self.high = torch.maximum(self.high, value.amax(dim=0))
        self._keep_sample(value, generator)
        self.rows += value.shape[0]

    def _keep_sample(self, value: Tensor, generator: torch.Generator) -> None:
        free = SAMPLE_ROWS - self.sample.shape[0]
        head, tail = value[:free], value[free:] if free > 0 else value
        if head.shape[0] and free > 0:
            self.sample = torch.cat([self.sample, head.clone()])
        seen = self.rows + (head.shape[0] if free > 0 else 0)
        if not tail.shape[0]:
            return
        # Row number i (from 1) replaces a kept one with probability SAMPLE_ROWS / i.
        order = torch.arange(seen + 1, seen + 1 + tail.shape[0], dtype=torch.float64)
        slots = (torch.rand(tail.shape[0], generator=generator, dtype=torch.float64) * order).long()
        chosen = slots < SAMPLE_ROWS
        self.sample[slots[chosen]] = tail[chosen]


@dataclass(frozen=True)
class Calibration:
    """What was seen: statistics of each linear that ran, by qualified name, and the linears that never ran.

    Linears that read the same tensor one after another (query, key and value, for one) have the same statistics object.
    """

    stats: dict[str, ChannelStats]
    never_ran: tuple[str, ...]
    batches: int


def collect(
    model: nn.Module,
    linears: Mapping[str, nn.Linear],
    batches: Iterable[Batch],
    progress: Callable[[int], None] | None = None,
) -> Calibration:
    """Run ``batches`` through ``model`` and gather the input statistics of ``linears``.

    Args:
        model: in eval mode; called as ``model(**batch)`` without gradients.
        linears: qualified name to module.
        batches: dicts of the model's inputs. ``attention_mask`` (B, S), where present, marks real tokens.
        progress: called with the number of batches done.

    Raises:
        CalibrationError: no batch at all, a batch that is no mapping, or NaN or infinity in a real token.
    """
    observer = _Observer(linears)
    done = 0
    with observer.watching(), torch.no_grad():
        for batch in _checked(batches):
            observer.start_batch(batch.get("attention_mask"))
            model(**batch)
            done += 1
            if progress is not None:
                progress(done)
    if done == 0:
        raise CalibrationError(
            "calibration saw no batch: the iterable is empty, or a generator that was used up before; "
            "pass a list or a fresh generator"
        )
    never = tuple(name for name, stats in observer.stats.items() if stats.rows == 0)
    seen = {name: stats for name, stats in observer.stats.items() if stats.rows}
    if not seen:
        raise CalibrationError("calibration ran, but no token reached a linear: is attention_mask all zero?")
    return Calibration(seen, never, done)


def _checked(batches: Iterable[Batch]) -> Iterator[Batch]:
    for batch in batches:
        if not isinstance(batch, Mapping):
            raise CalibrationError(
                f"a calibration batch is a {type(batch).__name__}; give dicts of the "
                "model's inputs, for example {'input_ids': ..., 'attention_mask': ...}"
            )
        yield batch


class _Observer:
    """Hooks that feed :class:`ChannelStats`."""

    def __init__(self, linears: Mapping[str, nn.Linear]) -> None:
        self.stats = {name: ChannelStats.empty(linear.in_features) for name, linear in linears.items()}
        self._linears = linears
        self._mask: Tensor | None = None
        self._last: tuple[Tensor | None, str] = (None, "")
        self._generator = torch.Generator().manual_seed(0)

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = [
            linear.register_forward_pre_hook(self._hook(name), with_kwargs=True)
            for name, linear in self._linears.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._last = (None, "")

    def start_batch(self, mask: Tensor | None) -> None:
        self._mask = None if mask is None or mask.ndim != 2 else mask.bool()
        self._last = (None, "")

    def _hook(self, name: str) -> Callable[..., None]:
        def observe(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            x = args[0] if args else kwargs["input"]
            self._observe(name, x)

        return observe

    def _observe(self, name: str, x: Tensor) -> None:
        """Take in what ``name`` reads; a tensor that another linear just read is not gathered twice."""
        rows = self._real_rows(x)
        if not rows.shape[0]:
            return
        if not bool(torch.isfinite(rows).all()):
            kind = "NaN" if bool(torch.isnan(rows).any()) else "infinity"
            raise CalibrationError(
                f"module {name!r} read {kind} in a real (unpadded) token; check the model and its calibration inputs"
            )
        tensor, leader = self._last
        if tensor is x:
            self.stats[name] = self.stats[leader]
            return
        self._last = (x, name)
        self.stats[name].update(rows, self._generator)

    def _real_rows(self, x: Tensor) -> Tensor:
        flat = x.detach().reshape(-1, x.shape[-1])
        if self._mask is None or x.shape[:-1] != self._mask.shape:
            return flat
        return flat[self._mask.reshape(-1)]
