"""What really ran: fused linears, kernels by name, the ISA and the AMX permission of this process."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from int8 import isa
from int8.compilation import CompiledModel
from int8.kernels import selection
from int8.quantization import weight_bits

#: A line that oneDNN prints for each primitive that it executes; the fields are primitive kind and implementation.
_EXECUTED = re.compile(r"^onednn_verbose,(?:v\d,)?primitive,exec,cpu,(?P<kind>\w+),(?P<name>[^,]+),", re.MULTILINE)


@dataclass(frozen=True)
class Evidence:
    """What one forward pass of a compiled model used. Counts are of original ``nn.Linear`` modules.

    Attributes:
        linears: linears of the model, quantized or not.
        quantized_linears: those whose weight is INT8.
        fused_linears: those that run in a fused kernel.
        kernels: kernels with their calls in one forward pass: ours (``int8:...``) and oneDNN's implementations.
            Kernels that Inductor generates itself and MKL's do not show there.
        isa_effective: the ISA this process is held to.
        amx_permission: whether the process holds Linux's permission for AMX tiles now.
        weight_bits: 7 where kernels would saturate with 8; None if nothing is quantized.
        selection: what was measured to choose the kernels of this process's products: for each problem the
            candidates' seconds; empty where nothing was chosen.
    """

    linears: int
    quantized_linears: int
    fused_linears: int
    kernels: Mapping[str, int]
    isa_effective: str
    amx_permission: bool | None
    weight_bits: int | None
    selection: tuple[Mapping[str, Any], ...] = ()


class Countable(Protocol):
    """A model as it runs, which knows what became of its linears: compiled now, or loaded from a package."""

    @property
    def linears(self) -> int: ...
    @property
    def quantized_linears(self) -> int: ...
    @property
    def fused_linears(self) -> int: ...
    def __call__(self, **inputs: Tensor) -> Any: ...


def collect(model: nn.Module, compiled: CompiledModel | Countable, batch: Mapping[str, Tensor]) -> Evidence:
    """Run ``compiled`` once on ``batch`` and say what ran.

    Args:
        model: the model as it was given to :func:`int8.compile` or :func:`int8.export`.
        compiled: its compiled form, which compiles now if it has not met the batch's shape, or its loaded package.
        batch: the model's inputs.
    """
    compiled(**batch)  # compiling packs weights with kernels of its own, which are not part of a forward pass
    before = own_kernel_calls()
    kernels = onednn_kernels(lambda: compiled(**batch))
    own = {name: calls - before.get(name, 0) for name, calls in own_kernel_calls().items()}
    return Evidence(
        linears=compiled.linears,
        quantized_linears=compiled.quantized_linears,
        fused_linears=compiled.fused_linears,
        kernels={**{name: calls for name, calls in own.items() if calls}, **kernels},
        isa_effective=isa.effective(),
        amx_permission=isa.amx_permission(),
        weight_bits=weight_bits(model),
        selection=tuple(_described(choice) for choice in selection.choices()),
    )


def own_kernel_calls() -> dict[str, int]:
    """How often each kernel of ours ran in this process."""
    if not hasattr(torch.ops.int8, "kernel_calls"):
        return {}  # the library was not needed so far
    return dict(torch.ops.int8.kernel_calls())


def _described(choice: selection.Choice) -> dict[str, Any]:
    return {**dataclasses.asdict(choice.problem), "kernel": choice.kernel, "times_s": dict(choice.times_s)}


def onednn_kernels(run: Callable[[], Any]) -> dict[str, int]:
    """oneDNN's implementations and how often each ran during ``run()``, most used first.

    oneDNN reports by printing, so the process's standard output is read through a file meanwhile.
    """
    with _captured_stdout() as read, _verbose():
        run()
        text = read()
    counts = Counter(match["name"] for match in _EXECUTED.finditer(text))
    return dict(counts.most_common())


def _verbose() -> AbstractContextManager[Any]:
    flags: Any = torch.backends.mkldnn
    return cast(AbstractContextManager[Any], flags.verbose(flags.VERBOSE_ON))


@contextmanager
def _captured_stdout() -> Iterator[Callable[[], str]]:
    """Send file descriptor 1 to a temporary file; the yielded function returns what was written so far."""
    sys.stdout.flush()
    saved = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield lambda: _read_all(file.fileno())
        finally:
            sys.stdout.flush()
            os.dup2(saved, 1)
            os.close(saved)


def _read_all(descriptor: int) -> str:
    import ctypes

    ctypes.CDLL(None).fflush(None)  # oneDNN prints through C's buffered stdout
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, size, 0).decode(errors="replace")
