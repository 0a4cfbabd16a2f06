"""What the operators of the C++ library return, by shape and dtype alone, for tracing."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from int8.kernels.layout import packed_bytes


@functools.cache
def register() -> None:
    """Register the fakes; the library must be loaded."""
    torch.library.register_fake("int8::gemm", _gemm)
    torch.library.register_fake("int8::pack", _pack)
    torch.library.register_fake("int8::unpack", _unpack)
    torch.library.register_fake("int8::attention", _attention)


def _gemm(levels: Tensor, packed: list[Tensor], n: list[int], *arguments: Any) -> Tensor:
    out_dtype = arguments[-2]
    return levels.new_empty((*levels.shape[:-1], sum(n)), dtype=out_dtype)


def _pack(qweight: Tensor, layout: str) -> Tensor:
    return qweight.new_empty(packed_bytes(*qweight.shape))


def _unpack(packed: Tensor, n: int, k: int, layout: str) -> Tensor:
    return packed.new_empty((n, k))


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, kernel: str) -> Tensor:
    batch, heads, queries, dim = query.shape
    return query.new_empty((batch, queries, heads, dim)).transpose(1, 2)
