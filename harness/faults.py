"""Faults that `harness selftest` injects on purpose, to see them caught. Imports no torch before one is installed.

A worker whose environment has ``INT8_TEST_FAULT`` installs the fault of that name and says so in its evidence (``fault
injected: scale``), so that such a record can never pass for a real one:

    scale     the weight scale of the last quantized linear is 100 times too large: outputs are wrong, nothing crashes
    unfused   the first quantized linear stays outside the compiled graph: right, and slow
    mask      the worker drops the ISA's mask that it was started under

A slowdown is asked for slice by slice instead (``slowdown`` of the worker's request ``time``), so that one process can
be measured with and without it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from harness.errors import UsageError

VARIABLE = "INT8_TEST_FAULT"
NAMES = ("scale", "unfused", "mask")


def named() -> str | None:
    """The fault that the environment names; None where there is none.

    Raises:
        UsageError: no such fault.
    """
    name = os.environ.get(VARIABLE) or None
    if name not in (None, *NAMES):
        raise UsageError(f"{VARIABLE}={name!r} is no fault; known: {', '.join(NAMES)}")
    return name


def before_torch() -> None:
    """Install the fault, if it is one that must come before torch is loaded."""
    if named() == "mask":
        _drop_mask()


def after_torch() -> None:
    """Install the fault, if it is one of the library's."""
    change = {"scale": _spoil_a_scale, "unfused": _leave_one_out}.get(named() or "")
    if change is not None:
        _after_quantize(change)


def slowed(call: Callable[[], object], fraction: float) -> Callable[[], object]:
    """``call``, made longer by ``fraction`` of its own time: the thread computes on, as slower code would."""

    def slow() -> object:
        begin = time.perf_counter_ns()
        result = call()
        until = begin + (time.perf_counter_ns() - begin) * (1.0 + fraction)
        while time.perf_counter_ns() < until:
            pass
        return result

    return slow


def _drop_mask() -> None:
    from int8 import isa

    os.environ.update(isa.environment(isa.best()))


def _after_quantize(change: Callable[[Any], None]) -> None:
    """Have ``change`` applied to every module that ``int8.quantize`` returns in this process."""
    import int8

    quantize = int8.quantize

    def faulty(*args: Any, **kwargs: Any) -> Any:
        module = quantize(*args, **kwargs)
        change(module)
        return module

    int8.quantize = faulty


def _spoil_a_scale(module: Any) -> None:
    from int8.quantization import quantized_modules

    *_, linear = quantized_modules(module).values()
    linear.weight.scale.mul_(100.0)  # type: ignore[attr-defined]


def _leave_one_out(module: Any) -> None:
    import torch

    from int8.quantization import quantized_modules

    class Outside(torch.nn.Module):
        def __init__(self, linear: Any) -> None:
            super().__init__()
            self.linear = linear

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(self, input: Any) -> Any:
            return self.linear(input)

    name, linear = next(iter(quantized_modules(module).items()))
    parent, _, own = name.rpartition(".")
    setattr(module.get_submodule(parent), own, Outside(linear))
