"""Chooses between our attention and torch's, by measuring both for the shape at hand; remembered on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from int8.errors import QuantizationError
from int8.kernels import build, selection

#: torch's own attention, the alternative to every kernel of ours.
TORCH = "torch"

#: Environment variable that overrides measuring: ``ours``, ``torch`` or ``auto``.
OVERRIDE = "INT8_ATTENTION"

#: Begins the name of the file of measured times.
_KIND = "attention-"

#: ISA -> our kernel for FP32 and for BF16 operands. BF16 is widened to FP32 where there are no BF16 tiles.
_KERNELS = {
    "amx": {torch.float32: "int8:attention_avx512", torch.bfloat16: "int8:attention_amx"},
    "vnni": dict.fromkeys((torch.float32, torch.bfloat16), "int8:attention_avx512"),
    "avx512": dict.fromkeys((torch.float32, torch.bfloat16), "int8:attention_avx512"),
    "avx2": dict.fromkeys((torch.float32, torch.bfloat16), "int8:attention_avx2"),
}


@dataclass(frozen=True)
class AttentionProblem:
    """One attention as a graph calls it: ``batch`` sequences of ``queries`` and ``keys`` tokens, ``heads`` of ``dim``.

    ``mask`` says what torch's attention reads: ``none``, or ``rows`` for one row of values a query.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    dim: int
    dtype: torch.dtype
    mask: str

    @property
    def name(self) -> str:
        """What the cache on disk calls it."""
        sizes = "x".join(map(str, (self.batch, self.heads, self.queries, self.keys, self.dim)))
        return f"{sizes} {self.mask} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class AttentionChoice:
    """The kernel chosen for a problem, and what each candidate took (seconds); empty where nothing was measured."""

    problem: AttentionProblem
    kernel: str
    times_s: Mapping[str, float]


_chosen: dict[tuple[AttentionProblem, str], AttentionChoice] = {}


def kernel_for(isa: str, dtype: torch.dtype) -> str | None:
    """Our kernel for operands of ``dtype``; None if there is none."""
    return _KERNELS[isa].get(dtype)


def choose(problem: AttentionProblem, isa: str) -> AttentionChoice:
    """Our kernel for ``problem`` under ``isa``, or :data:`TORCH`: as the override says, remembered, or measured now.

    Raises:
        QuantizationError: the override is not a known word.
    """
    wanted = os.environ.get(OVERRIDE, "auto")
    if wanted not in ("auto", "ours", TORCH):
        raise QuantizationError(f"{OVERRIDE}={wanted} is unknown; it may be auto, ours or torch")
    kernel = kernel_for(isa, problem.dtype)
    if kernel is None or wanted == TORCH:
        return AttentionChoice(problem, TORCH, {})
    build.load()
    if wanted == "ours":
        return AttentionChoice(problem, kernel, {})
    if (problem, kernel) not in _chosen:
        times_s = selection.remembered(problem.name, (kernel, TORCH), _KIND) or _measured(problem, kernel)
        _chosen[problem, kernel] = AttentionChoice(problem, selection.preferred(times_s), times_s)
    return _chosen[problem, kernel]


def choices() -> tuple[AttentionChoice, ...]:
    """Every measured choice of this process so far."""
    return tuple(_chosen.values())


def _measured(problem: AttentionProblem, kernel: str) -> dict[str, float]:
    # Compilers call this while they trace: the tensors here are real, and autocast changes nothing.
    with unset_fake_temporarily(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        times_s = selection.measure(_candidates(problem, kernel))
    selection.remember(problem.name, times_s, _KIND)
    return times_s


def _candidates(problem: AttentionProblem, kernel: str) -> dict[str, Callable[[], Any]]:
    """Ours first: it is preferred unless torch's is clearly faster. Nothing is masked out, so neither is favoured."""
    generator = torch.Generator().manual_seed(0)

    def operand(tokens: int) -> Any:
        shape = (problem.batch, tokens, problem.heads, problem.dim)
        return torch.randn(shape, generator=generator).to(problem.dtype).transpose(1, 2)

    query, key, value = operand(problem.queries), operand(problem.keys), operand(problem.keys)
    scale = problem.dim**-0.5
    bias = keep = None
    if problem.mask != "none":
        bias = torch.zeros(problem.batch, 1, problem.queries, problem.keys, dtype=problem.dtype)
        keep = torch.ones(problem.batch, 1, 1, problem.keys, dtype=torch.bool)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return {
        kernel: lambda: torch.ops.int8.attention(query, key, value, keep, scale, kernel),
        TORCH: lambda: flash(query, key, value, attn_mask=bias, scale=scale),
    }
