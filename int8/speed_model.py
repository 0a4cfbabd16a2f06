"""How long one group of linears takes in each number format, roughly: enough to rank choices, never a measurement.

    GEMM              2 * M * N * K operations at the rate that linears reach inside whole models
    quantization      M * K elements of the input, each once; nothing beyond its producer where the scale is calibrated
    decomposition     what LLM.int8() adds: the search for outlier dimensions, a second product, and adding it

The constants come from whole-model times of 4 layers of BERT-large, 8 sequences of 128 tokens, on 2 cores of a Xeon
with AMX (torch 2.13, torchao's SmoothQuant through Inductor): static 72 ms of which its linears take 40, dynamic 86 ms,
BF16 103 ms, and with VNNI alone static 182 ms, dynamic 180, FP32 395 ms. 103 GFLOP of linears and 30 M quantized
elements lie in them. For AVX512 without VNNI and for AVX2 only the ratio was looked at, on other hosts. Kernel
selection, which measures on the host itself, decides the kernel; this decides the format, and only ratios matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from int8.errors import IsaError

#: Formats of a group of linears: INT8 with calibrated scales, with one scale a token, LLM.int8(), or no INT8.
Format = Literal["static", "dynamic", "llm-int8", "float"]
FORMATS: tuple[Format, ...] = ("static", "dynamic", "llm-int8", "float")

#: Tokens of one forward pass that costs are stated for: 8 sequences of 128.
TOKENS = 1024


@dataclass(frozen=True)
class IsaRates:
    """Rates of one ISA on two cores.

    Attributes:
        int8_per_s, float_per_s: operations of a GEMM a second, INT8 and the floating-point format that is native.
        static_s, dynamic_s: seconds to quantize one element, with a calibrated scale (fused into the producer) and with
            one a token (two passes over the row).
        pass_s: seconds an element of one more pass over a tensor.
    """

    int8_per_s: float
    float_per_s: float
    static_s: float
    dynamic_s: float
    pass_s: float


_RATES = {
    "amx": IsaRates(2.6e12, 1.4e12, 0.05e-9, 0.50e-9, 0.3e-9),
    "vnni": IsaRates(0.74e12, 0.30e12, 0.05e-9, 0.50e-9, 0.3e-9),
    "avx512": IsaRates(0.45e12, 0.30e12, 0.05e-9, 0.50e-9, 0.3e-9),
    "avx2": IsaRates(0.25e12, 0.15e12, 0.05e-9, 0.50e-9, 0.3e-9),
}


def group_s(kind: Format, inner: int, outer: int, *, isa: str, outliers: int = 0, tokens: int = TOKENS) -> float:
    """Seconds that a group of linears takes.

    Args:
        kind: its format.
        inner: K, features of the input that the group shares.
        outer: sum of the output features of its linears.
        isa: one of amx, vnni, avx512, avx2.
        outliers: feature dimensions that LLM.int8() multiplies in floating point.
        tokens: M.

    Raises:
        IsaError: an ISA without rates.
    """
    if isa not in _RATES:
        raise IsaError(f"the speed model knows the ISAs {', '.join(_RATES)}, not {isa!r}")
    rates = _RATES[isa]
    operations = 2.0 * tokens * inner * outer
    if kind == "float":
        return operations / rates.float_per_s
    if kind == "static":
        return operations / rates.int8_per_s + tokens * inner * rates.static_s
    seconds = operations / rates.int8_per_s + tokens * inner * rates.dynamic_s
    if kind == "llm-int8":
        seconds += tokens * (inner + outer) * rates.pass_s + 2.0 * tokens * outliers * outer / rates.float_per_s
    return seconds
