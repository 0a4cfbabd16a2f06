"""Sizes of packed weights (int8/kernels/csrc/gemm_op.cpp says what lies where)."""

from __future__ import annotations

from typing import Any

#: Columns of a panel, and the multiple to which K is padded.
PANEL, DEPTH = 16, 64

#: ISA -> layout of the weights that its kernels read, and the kernels to choose from, the likeliest first.
LAYOUTS = {"amx": "k4", "vnni": "k4", "avx512": "k2", "avx2": "k2"}
KERNELS = {
    # The last one for few rows: tiles have to be set up. It reads the same layout.
    "amx": ("int8:amx_stream", "int8:amx", "int8:vnni"),
    "vnni": ("int8:vnni",),
    "avx512": ("int8:avx512",),
    "avx2": ("int8:avx2",),
}
#: The same for weights that keep to 7 bits, where an ISA has faster kernels for those; they would saturate with 8.
KERNELS_7BIT = {"avx2": ("int8:avx2_7bit",)}


def layout_of(kernel: str) -> str:
    """The layout of the weights that ``kernel`` reads."""
    if any(kernel in names for names in KERNELS_7BIT.values()):
        return "k4"
    return next((LAYOUTS[isa] for isa, names in KERNELS.items() if kernel in names), "k2")


def packed_bytes(rows: Any, inner: Any) -> Any:
    """Bytes of a packed (rows, inner) weight: padded levels and one INT32 sum a padded row."""
    columns = -(-rows // PANEL) * PANEL
    return columns * (-(-inner // DEPTH) * DEPTH) + 4 * columns
