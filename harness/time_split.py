"""Where the time of a forward pass goes: linears, attention, and the rest, by torch's profiler.

Operators are told apart by name, the outermost one that has a kind taking what it calls. Kernels that Inductor writes
itself never reach the profiler (unless compiled to do so, which would change what is measured), so the rest is what is
left of the pass. As in the paper (arXiv 2608.18182, section 5) a linear is all that its operator does: the GEMM with
packing, scales, bias and whatever else is fused into it; what Inductor wrote around it counts as rest.

Importing this module imports no torch; profiling does.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harness.records import TimeSplit

Kind = Literal["linear", "attention", "other"]
Shape = tuple[int, ...]

#: Untimed passes before the profiled ones: the worker slept while others ran.
SETTLE = 1

_PASS = "harness::pass"
_LINEAR = re.compile(
    r"aten::(linear|addmm|mm|_int_mm|_addmm_activation)$"
    r"|mkl::_mkl_linear|mkldnn::_linear_pointwise|onednn::(qlinear|linear)"
    r"|int8::\w*(gemm|linear|outlier_product)"
)
_ATTENTION = re.compile(r"\w+::\w*(scaled_dot_product|attention)|aten::(bmm|baddbmm|_softmax)$")


@dataclass(frozen=True)
class Pass:
    """Seconds of one forward pass, and of the linears and the attention in it; ``linear_calls`` were seen."""

    total_s: float
    linear_s: float
    attention_s: float
    linear_calls: int


@dataclass(frozen=True)
class Kernel:
    """One operator with one set of input shapes: ``calls`` in one pass, each ``seconds`` long (the median)."""

    name: str
    kind: Kind
    shapes: tuple[Shape, ...]
    calls: int
    seconds: float

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Kernel:
        """The kernel in ``data``, made by dataclasses.asdict and sent as JSON."""
        return cls(**{**data, "shapes": tuple(tuple(shape) for shape in data["shapes"])})


@dataclass(frozen=True)
class Profiled:
    """What profiling some passes gave. ``t0``: Unix time in seconds of the first."""

    t0: float
    passes: tuple[Pass, ...]
    kernels: tuple[Kernel, ...]


def kind_of(name: str) -> Kind:
    """What the operator ``name`` (``namespace::operator``) is part of."""
    if _ATTENTION.match(name):
        return "attention"
    return "linear" if _LINEAR.match(name) else "other"


def split(passes: Sequence[Pass], linears: int | None) -> TimeSplit | None:
    """Seconds of one pass by kind, each the median over ``passes``.

    Args:
        linears: how many the model has. Query, key and value may be one product, so that four calls stand for six.

    Returns:
        None where fewer calls were seen: then some run where the profiler does not look (in a compiled package, in a
        kernel that Inductor generated), and would be taken for the rest.
    """
    least = max(math.ceil((linears or 0) * 4 / 6), 1)
    if not passes or any(one.linear_calls < least for one in passes):
        return None
    return TimeSplit(
        linear=statistics.median(one.linear_s for one in passes),
        attention=statistics.median(one.attention_s for one in passes),
        other=statistics.median(max(one.total_s - one.linear_s - one.attention_s, 0.0) for one in passes),
    )


def profile(call: Callable[[], object], seconds: float, min_passes: int, max_passes: int) -> Profiled:
    """Profile passes of ``call`` for about ``seconds``.

    Args:
        call: one forward pass, compiled already.
        min_passes: passes profiled in any case.
        max_passes: passes profiled at most.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    for _ in range(SETTLE):
        call()
    t0, begin, count = time.time(), time.perf_counter(), 0
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        while count < min_passes or (count < max_passes and time.perf_counter() - begin < seconds):
            with record_function(_PASS):
                call()
            count += 1
    roots = [event for event in profiler.events() or () if event.name == _PASS]
    found = [list(_outermost(root.cpu_children)) for root in roots]
    passes = tuple(_pass(root, events) for root, events in zip(roots, found, strict=True))
    return Profiled(t0, passes, kernels([event for events in found for event in events], len(roots)))


def merged(rounds: Iterable[Kernel]) -> tuple[Kernel, ...]:
    """Kernels of several profiles of one pass: one for each name and shapes, with the median of its seconds."""
    grouped: dict[tuple[str, tuple[Shape, ...]], list[Kernel]] = {}
    for kernel in rounds:
        grouped.setdefault((kernel.name, kernel.shapes), []).append(kernel)
    return tuple(
        dataclasses.replace(found[0], seconds=statistics.median(kernel.seconds for kernel in found))
        for found in grouped.values()
    )


def kernels(events: Iterable[Any], passes: int) -> tuple[Kernel, ...]:
    """The profiler's ``events`` of ``passes`` passes by name and input shapes, the most expensive first."""
    grouped: dict[tuple[str, tuple[Shape, ...]], list[float]] = {}
    for event in events:
        shapes = tuple(tuple(shape) for shape in event.input_shapes if shape and all(isinstance(n, int) for n in shape))
        grouped.setdefault((event.name, shapes), []).append(_seconds(event))
    found = [
        Kernel(name, kind_of(name), shapes, round(len(times) / passes), statistics.median(times))
        for (name, shapes), times in grouped.items()
    ]
    return tuple(sorted(found, key=lambda kernel: -kernel.calls * kernel.seconds))


def _pass(root: Any, events: Iterable[Any]) -> Pass:
    spent: dict[Kind, list[float]] = {"linear": [], "attention": []}
    for event in events:
        spent[kind_of(event.name)].append(_seconds(event))
    linear, attention = spent["linear"], spent["attention"]
    return Pass(_seconds(root), math.fsum(linear), math.fsum(attention), len(linear))


def _outermost(events: Iterable[Any]) -> Iterator[Any]:
    """Events with a kind, without those inside one."""
    for event in events:
        if kind_of(event.name) == "other":
            yield from _outermost(event.cpu_children)
        else:
            yield event


def _seconds(event: Any) -> float:
    return float(event.time_range.elapsed_us()) / 1e6
