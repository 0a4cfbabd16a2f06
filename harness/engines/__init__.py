"""Engines: what executes a recipe. Importing this package imports no torch; preparing a model with an engine does."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, runtime_checkable

from harness.errors import UsageError
from harness.records import Evidence, Memory
from int8.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from harness.models import LoadedModel

Batch = Mapping[str, "Tensor"]
Phase = Literal["load", "calibrate", "quantize", "compile", "warmup"]

_MODULES = {name: f"harness.engines.{name}" for name in ("int8", "torchao", "openvino", "onnxruntime", "ctranslate2")}

#: Other runtimes for the same models, and the recipes that each offers; see :mod:`harness.engines.peer`.
PEER_RECIPES: Mapping[str, tuple[str, ...]] = {
    "openvino": ("fp32", "bf16", "sq-static"),
    "onnxruntime": ("fp32", "static", "dynamic"),
    "ctranslate2": ("fp32", "dynamic"),
}


@dataclass
class Clocks:
    """Seconds spent in each phase of making a cell ready. Phases never overlap: the inner one of two is an error.

    ``on_phase`` is told each phase as it starts.
    """

    seconds: dict[Phase, float] = field(default_factory=dict)
    on_phase: Callable[[str], None] | None = None
    _running: Phase | None = None
    _started: float = 0.0

    @contextmanager
    def measure(self, phase: Phase) -> Iterator[None]:
        """Add the seconds of the ``with`` block to ``phase``, up to where :meth:`switch` ends it."""
        if self._running is not None:
            raise RuntimeError(f"phase {phase} started inside phase {self._running}")
        self._start(phase)
        try:
            yield
        finally:
            self._stop()
            self._running = None

    def switch(self, phase: Phase) -> None:
        """Inside a ``measure`` block: end its phase here and give the rest of the block to ``phase``."""
        if self._running is None:
            raise RuntimeError(f"phase {phase} has no running phase to follow")
        self._stop()
        self._start(phase)

    def _start(self, phase: Phase) -> None:
        self._running = phase
        if self.on_phase is not None:
            self.on_phase(phase)
        self._started = time.perf_counter()

    def _stop(self) -> None:
        assert self._running is not None
        spent = time.perf_counter() - self._started
        self.seconds[self._running] = self.seconds.get(self._running, 0.0) + spent


class Prepared(Protocol):
    """A model made ready by an engine: what is timed and judged."""

    def __call__(self, batch: Batch) -> Tensor:
        """The model's output for ``batch``; the first call of each input shape compiles."""
        ...

    def memory(self) -> Memory:
        """Bytes of the model as it runs; ``peak_rss_bytes`` is left to the worker."""
        ...

    def evidence(self, batch: Batch) -> Evidence:
        """What really runs for batches shaped like ``batch``; call it after such a batch has been compiled."""
        ...


@runtime_checkable
class Packageable(Protocol):
    """A prepared model that can also be measured as deploy ``aoti``."""

    def packaged(self) -> Prepared:
        """The same model, written as a package and loaded again; the first call of each input shape does so."""
        ...


class Engine(Protocol):
    """Turns a loaded FP32 model into something that executes a recipe."""

    name: str

    def unsupported(self, recipe: Recipe, isa: str, deploy: str) -> str | None:
        """Why this combination cannot be measured; None if it can. Imports no torch."""
        ...

    def prepare(
        self, model: LoadedModel, recipe: Recipe, isa: str, calibration: Iterable[Batch], clock: Clocks
    ) -> Prepared:
        """Quantize ``model`` for ``isa`` and make it ready to compile.

        Args:
            model: the FP32 model; its module may be changed, the caller drops it.
            calibration: batches of inputs; read only by recipes that need them.
            clock: is given the phases calibrate and quantize.
        """
        ...


def names() -> tuple[str, ...]:
    """Names of the engines that this version has."""
    return tuple(_MODULES)


def get(name: str) -> Engine:
    """The engine called ``name``.

    Raises:
        UsageError: no such engine.
    """
    if name not in _MODULES:
        raise UsageError(f"unknown engine {name!r}; known: {', '.join(_MODULES)}")
    module: Any = importlib.import_module(_MODULES[name])
    return cast(Engine, module.ENGINE)
