"""Chooses between kernels by measuring them, and remembers the choice on disk.

Weights are measured as a model meets them: enough copies take turns that none is in a core's cache from the call
before. Kernels that win with warm weights and lose in a model are a known trap (pytorch/pytorch#148494).
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from int8 import isa as isa_module
from int8.errors import QuantizationError
from int8.kernels.build import cache_folder, library_key
from int8.kernels.layout import KERNELS, KERNELS_7BIT, layout_of

#: oneDNN's fused linear, the alternative to every kernel of ours.
ONEDNN = "onednn"

#: Environment variable that overrides measuring for linears: a kernel's name, or ``auto``.
OVERRIDE = "INT8_KERNEL"

#: A candidate must be this much faster than the first one to be preferred: differences below are noise.
_MARGIN = 0.03
_ROUNDS = 7
#: Bytes that the copies of a weight fill, beyond any L2.
_COLD_BYTES = 24 * 2**20


@dataclass(frozen=True)
class Problem:
    """One product as a graph calls it.

    Attributes:
        m, n, k: rows of the activation, output and inner features.
        epilogue: what follows inside the kernel: ``none``, ``gelu``, ``gelu_tanh`` or ``relu``, with ``+residual`` or
            ``+int8`` behind it where a residual is added or the next linear's levels are written.
        out_dtype: ``float32`` or ``bfloat16``, before requantization.
    """

    m: int
    n: int
    k: int
    epilogue: str
    out_dtype: str


@dataclass(frozen=True)
class Choice:
    """The kernel chosen for a problem, and what each candidate took (seconds); empty where nothing was measured."""

    problem: Problem
    kernel: str
    times_s: Mapping[str, float]


_chosen: dict[tuple[Problem, tuple[str, ...]], Choice] = {}


def measure(candidates: Mapping[str, Callable[[], Any]], rounds: int = _ROUNDS) -> dict[str, float]:
    """Least seconds of a call of each candidate, taken in turns after one call to warm up.

    The least: what disturbs a machine only ever adds time, and a choice is kept.
    """
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():
        run()
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            samples[name].append(time.perf_counter() - start)
    return {name: min(times) for name, times in samples.items()}


def preferred(times_s: Mapping[str, float]) -> str:
    """The first name, or the fastest one if that is clearly faster."""
    first, fastest = next(iter(times_s)), min(times_s, key=lambda name: times_s[name])
    return fastest if times_s[fastest] < times_s[first] * (1 - _MARGIN) else first


def own_kernels(isa: str, weight_bits: int = 8) -> tuple[str, ...]:
    """Names of our kernels for ``isa``, the likeliest first, of one layout; none where the override says oneDNN."""
    override = os.environ.get(OVERRIDE, "auto")
    narrow = KERNELS_7BIT.get(isa, ()) if weight_bits == 7 else ()
    if override == "auto":
        return narrow or KERNELS[isa]
    if override == ONEDNN:
        return ()
    if override not in (*KERNELS[isa], *narrow, "int8:portable"):
        known = ", ".join(("auto", ONEDNN, *KERNELS[isa], *narrow))
        raise QuantizationError(f"{OVERRIDE}={override} names no kernel of ISA {isa}; it may be {known}")
    return (override,)


def choose(problem: Problem, isa: str, weight_bits: int = 8) -> Choice:
    """The kernel for ``problem`` under ``isa``: remembered, or measured now.

    Args:
        weight_bits: 8, or 7. Without VNNI oneDNN's kernels saturate with 8, so they are no choice then.
    """
    onednn = weight_bits == 7 or isa in ("amx", "vnni")
    names = own_kernels(isa, weight_bits)
    candidates = (*names, ONEDNN) if onednn and os.environ.get(OVERRIDE, "auto") == "auto" else names or (ONEDNN,)
    known = _chosen.get((problem, candidates))
    if known is not None:
        return known
    if len(candidates) == 1:
        choice = Choice(problem, candidates[0], {})
    else:
        known_s = remembered(_name(problem), candidates)
        choice = Choice(problem, preferred(known_s), known_s) if known_s else _measured(problem, candidates)
    _chosen[problem, candidates] = choice
    return choice


def choices() -> tuple[Choice, ...]:
    """Every choice of this process so far."""
    return tuple(_chosen.values())


def _measured(problem: Problem, candidates: Sequence[str]) -> Choice:
    # Compilers call this while they trace: the tensors here are real, and autocast changes nothing.
    with unset_fake_temporarily(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        times_s = measure({name: _call(problem, name) for name in candidates})
    remember(_name(problem), times_s)
    return Choice(problem, preferred(times_s), times_s)


def _call(problem: Problem, kernel: str) -> Callable[[], Any]:
    """A call of ``kernel`` on random levels, each time with another copy of the weight."""
    generator = torch.Generator().manual_seed(0)
    n, k = problem.n, problem.k
    levels = torch.randint(-127, 128, (problem.m, k), dtype=torch.int8, generator=generator)
    weight = torch.randint(-63, 64, (n, k), dtype=torch.int8, generator=generator)
    copies = max(1, min(64, -(-_COLD_BYTES // (n * k))))
    run = _onednn_call(problem, levels, weight) if kernel == ONEDNN else _own_call(problem, kernel, levels)
    pack = torch.ops.onednn.qlinear_prepack if kernel == ONEDNN else torch.ops.int8.pack
    layout = [problem.m, k] if kernel == ONEDNN else layout_of(kernel)
    packed = pack(weight, layout)
    # oneDNN's packed tensors cannot be cloned.
    weights = [packed, *(pack(weight, layout) if kernel == ONEDNN else packed.clone() for _ in range(copies - 1))]
    turn = iter(range(2**62))
    return lambda: run(weights[next(turn) % copies])


def _own_call(problem: Problem, kernel: str, levels: Any) -> Callable[[Any], Any]:
    scale, bias = torch.rand(problem.n), torch.rand(problem.n)
    post, residual, inverse = _epilogue(problem)
    dtype = torch.int8 if inverse is not None else getattr(torch, problem.out_dtype)

    def run(weight: Any) -> Any:
        return torch.ops.int8.gemm(
            levels,
            [weight],
            [problem.n],
            scale,
            bias,
            None,
            None,
            None,
            post,
            residual,
            inverse,
            None,
            None,
            False,
            dtype,
            kernel,
        )

    return run


def _onednn_call(problem: Problem, levels: Any, weight: Any) -> Callable[[Any], Any]:
    """oneDNN, then one pass over the result for what our kernels do inside, as Inductor's loop would."""
    scale, bias = torch.rand(problem.n), torch.rand(problem.n)
    post, residual, inverse = _epilogue(problem)
    signed = isa_module.effective() == "amx"
    a = levels if signed else (levels.to(torch.int16) + 128).to(torch.uint8)
    zero_point = 0 if signed else 128
    dtype = getattr(torch, problem.out_dtype)

    def run(packed: Any) -> Any:
        result = torch.ops.onednn.qlinear_pointwise(
            a, 1.0, zero_point, packed, scale, None, bias, 1.0, 0, dtype, "none", [], ""
        )
        if post in ("gelu", "gelu_tanh"):
            return torch.nn.functional.gelu(result, approximate="tanh" if post == "gelu_tanh" else "none")
        if residual is not None or inverse is not None or post == "relu":
            return torch.relu_(result)
        return result

    return run


def _epilogue(problem: Problem) -> tuple[str, Any, Any]:
    """(post-operation, residual or None, factors of the next levels or None) for measuring."""
    post, *extras = problem.epilogue.split("+")
    dtype = getattr(torch, problem.out_dtype)
    residual = torch.rand(problem.m, problem.n).to(dtype) if "residual" in extras else None
    return post, residual, torch.rand(problem.n) if "int8" in extras else None


def _file(kind: str) -> Path:
    return cache_folder() / "selection" / f"{kind}{_host_key()}.json"


@functools.cache
def _host_key() -> str:
    """What a choice depends on beside its problem: processor, ISA, threads, torch and our kernels."""
    import hashlib

    parts = (_cpu_model(), isa_module.effective(), str(torch.get_num_threads()), torch.__version__, library_key())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    wanted = ("model name", "model\t", "stepping", "cpu family")
    return ";".join(sorted({line for line in lines if line.startswith(wanted)}))


def remembered(name: str, candidates: Sequence[str], kind: str = "") -> dict[str, float] | None:
    """Seconds of each candidate, in their order, as an earlier process measured them; None if it measured others.

    Args:
        name: the problem as the file calls it.
        kind: begins the file's name; each kind of problem has a file of its own.
    """
    times = _read(kind).get(name)
    if not isinstance(times, dict) or set(times) != set(candidates):
        return None
    return {candidate: float(times[candidate]) for candidate in candidates}


def remember(name: str, times_s: Mapping[str, float], kind: str = "") -> None:
    """Add what was measured to the file; a cache that cannot be written only costs time."""
    path = _file(kind)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {**_read(kind), name: dict(times_s)}
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(content, file, indent=1)
        Path(file.name).replace(path)
    except OSError:
        return


def _read(kind: str) -> dict[str, Any]:
    try:
        found = json.loads(_file(kind).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _name(problem: Problem) -> str:
    return f"{problem.m}x{problem.n}x{problem.k} {problem.epilogue} {problem.out_dtype}"
