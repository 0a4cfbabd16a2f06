"""Checks kernels where they will run, before anything is trusted to them.

A compiler that drops a store or a CPU with a fault makes a kernel that is fast and wrong. A product of ragged sizes,
with most parts of the epilogue, takes a millisecond and shows it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from int8.errors import ToolchainError
from int8.kernels.layout import layout_of

_ROWS, _COLUMNS, _INNER = 37, 41, 133


@functools.cache
def check(names: tuple[str, ...]) -> None:
    """Multiply small integers with each kernel and compare with exact arithmetic; once a process.

    Raises:
        ToolchainError: a kernel gives other numbers.
    """
    for name in names:
        if not _right(name):
            raise ToolchainError(
                f"kernel {name} computes wrong numbers as this compiler built it; set INT8_KERNEL=onednn to go on "
                "without our kernels, and CXX to try another compiler"
            )


@torch.no_grad()
def _right(name: str) -> bool:
    generator = torch.Generator().manual_seed(1)
    levels = torch.randint(-127, 128, (_ROWS, _INNER), dtype=torch.int8, generator=generator)
    weight = torch.randint(-63, 64, (_COLUMNS, _INNER), dtype=torch.int8, generator=generator)
    residual = torch.randn(_ROWS, _COLUMNS, generator=generator)
    scale = torch.rand(_COLUMNS, generator=generator) * 1e-4
    zero_point = torch.tensor(-3, dtype=torch.int8)
    exact = levels.double() @ weight.double().t() + 3 * weight.double().sum(1)
    expected = torch.nn.functional.gelu((exact * scale).float()) + residual
    packed = torch.ops.int8.pack(weight, layout_of(name))
    result: Tensor = torch.ops.int8.gemm(
        levels, [packed], [_COLUMNS], scale, None, None, None, zero_point, "gelu", residual, None, None, None, False,
        torch.float32, name,
    )  # fmt: skip
    return torch.allclose(result, expected, rtol=1e-5, atol=1e-5)
