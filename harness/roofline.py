"""Rooflines and Amdahl ceilings, as section 5 of arXiv 2608.18182 draws them. Pure: numbers in, numbers out.

A product of M x K by K x N does 2 M N K operations and moves its operands once; operations per byte are its intensity.
Below the balance point (peak over bandwidth) bandwidth bounds it, above it arithmetic: attainable is
min(peak, intensity * bandwidth) (S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52, 2009). The paper lets
weights that fit into the last-level cache come from there, and mixes the bandwidths by bytes; here each operand comes
from the innermost level that holds it:

    weights       all linears' weights together, since a forward pass runs through all of them before it meets one again
    activations   input and output of the product itself, which the operation before it has just written

What is counted as linear time is the paper's linear block: the operator with all that is fused into it (packing,
scales, bias, activation function, requantization), not the bare GEMM. A fraction of the roof is a lower bound for it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from harness.time_split import Kernel, Shape

Kind = Literal["linear", "attention"]
Level = Literal["l2", "l3", "memory"]
Bound = Literal["compute", "memory"]
Dtype = Literal["fp32", "bf16", "int8"]

LEVELS: tuple[Level, ...] = ("l2", "l3", "memory")
BYTES: Mapping[Dtype, int] = {"fp32": 4, "bf16": 2, "int8": 1}

#: The label of attention that is one kernel, its scores never leaving the core.
FUSED_ATTENTION = "attention, one kernel"


@dataclass(frozen=True)
class EncoderShape:
    """Sizes of an encoder: ``intermediate`` is the width of its feed-forward layer, ``heads`` divide ``hidden``."""

    layers: int
    hidden: int
    intermediate: int
    heads: int


@dataclass(frozen=True)
class Product:
    """A matrix product of a model: ``batch`` independent ones of (m, k) by (k, n), called ``calls`` times in a pass.

    ``fused``: scores and context of attention in one kernel, (m, k) by (k, n) and that by (n, k).
    """

    label: str
    kind: Kind
    m: int
    n: int
    k: int
    calls: int
    batch: int = 1
    fused: bool = False

    @property
    def operations(self) -> int:
        """Multiplications and additions of one call."""
        return 2 * self.batch * self.m * self.n * self.k * (2 if self.fused else 1)

    @property
    def weight_elements(self) -> int:
        """Elements of the second operand: weights, or keys and values."""
        return self.batch * self.n * self.k * (2 if self.fused else 1)

    @property
    def input_elements(self) -> int:
        """Elements of the first operand."""
        return self.batch * self.m * self.k

    @property
    def output_elements(self) -> int:
        """Elements of the result."""
        return self.batch * self.m * (self.k if self.fused else self.n)


@dataclass(frozen=True)
class Precision:
    """Dtypes of a product: ``operands`` are multiplied, ``result`` is written."""

    operands: Dtype
    result: Dtype


@dataclass(frozen=True)
class Machine:
    """Roofs of a host under one ISA, all threads together.

    Attributes:
        operations: peak operations a second by dtype; a dtype without native instructions is missing.
        bandwidth: bytes a second by level; a level that was not measured is missing.
        capacity: bytes that a level holds; memory needs none.
    """

    operations: Mapping[Dtype, float]
    bandwidth: Mapping[Level, float]
    capacity: Mapping[Level, int]

    def level(self, size: int, beside: int = 0) -> Level:
        """The innermost measured level that holds ``size`` bytes, in the last-level cache ``beside`` others."""
        for level in LEVELS[:-1]:
            needed = size + (beside if level == "l3" else 0)
            if level in self.bandwidth and needed <= self.capacity.get(level, 0):
                return level
        return "memory"


@dataclass(frozen=True)
class Point:
    """A product under its roof.

    Attributes:
        dtype: of the operands.
        bytes_moved: by one call.
        intensity: operations a byte.
        weights_from, activations_from: where operands come from.
        bandwidth: bytes a second, mixed by bytes.
        peak: operations a second of the dtype.
        balance: the intensity at which the bound changes.
        attainable: operations a second.
        bound: what limits it.
        measured: operations a second; None where no kernel of the profile is this product.
        seconds: of one call, measured.
    """

    product: Product
    dtype: Dtype
    bytes_moved: int
    intensity: float
    weights_from: Level
    activations_from: Level
    bandwidth: float
    peak: float
    balance: float
    attainable: float
    bound: Bound
    seconds: float | None = None

    @property
    def measured(self) -> float | None:
        """Operations a second; None where it was not measured."""
        return None if self.seconds is None else self.product.operations / self.seconds

    @property
    def fraction(self) -> float | None:
        """What is measured of what is attainable."""
        return None if self.measured is None else self.measured / self.attainable


@dataclass(frozen=True)
class Ceiling:
    """How much faster than FP32 a recipe could be, and how much of it is reached.

    Attributes:
        linear_share: f, of FP32's time.
        linear_gain: g, the ratio of the roofs' times over all linears.
        rest_gain: h, of what is no linear.
        ceiling: Amdahl's bound on the speed-up over FP32.
        speedup: measured; None where it was not.
        linear_speedup: of the linears alone, measured.
        at_roof: the speed-up if linears ran at their own roof and the rest at h: unlike ``ceiling`` it does not assume
            that FP32 stays below its roof as far as it does now.
    """

    linear_share: float
    linear_gain: float
    rest_gain: float
    ceiling: float
    at_roof: float
    speedup: float | None
    linear_speedup: float | None

    @property
    def reached(self) -> float | None:
        """The measured speed-up as a share of the ceiling."""
        return None if self.speedup is None else self.speedup / self.ceiling


# --- a model's products -----------------------------------------------------------------------------------------------


def linears(shape: EncoderShape, batch: int, seq: int, joint: int) -> tuple[Product, ...]:
    """The distinct linears of an encoder for ``batch`` sequences of ``seq`` tokens.

    Args:
        joint: layers whose query, key and value are one product.
    """
    tokens, hidden, inner, layers = batch * seq, shape.hidden, shape.intermediate, shape.layers
    square = "attention output" if joint == layers else "query, key, value, attention output"
    together = (Product("query, key, value in one", "linear", tokens, 3 * hidden, hidden, joint),) if joint else ()
    return (
        *together,
        Product(square, "linear", tokens, hidden, hidden, layers + 3 * (layers - joint)),
        Product("first FFN linear", "linear", tokens, inner, hidden, layers),
        Product("second FFN linear", "linear", tokens, hidden, inner, layers),
    )


def attention(shape: EncoderShape, batch: int, seq: int) -> tuple[Product, ...]:
    """Attention's two batched products, each by itself, and both as one kernel."""
    heads, width = batch * shape.heads, shape.hidden // shape.heads
    return (
        Product("attention scores", "attention", seq, seq, width, shape.layers, heads),
        Product("attention context", "attention", seq, width, seq, shape.layers, heads),
        Product(FUSED_ATTENTION, "attention", seq, seq, width, shape.layers, heads, fused=True),
    )


def precision(kind: Kind, quantized: bool, compute_dtype: Dtype) -> Precision:
    """Dtypes of a recipe's products: its linears multiply INT8 where it quantizes; results are in the compute dtype."""
    return Precision("int8" if quantized and kind == "linear" else compute_dtype, compute_dtype)


# --- roofs ------------------------------------------------------------------------------------------------------------


def place(product: Product, dtypes: Precision, machine: Machine, weight_bytes: int) -> Point:
    """``product`` under its roof.

    Args:
        weight_bytes: of all linears of the model in the operands' dtype; for attention, whose operands are all
            activations, it does not matter.

    Raises:
        KeyError: the machine has no peak for the dtype, or no bandwidth of memory.
    """
    weights = product.weight_elements * BYTES[dtypes.operands]
    moved = product.input_elements * BYTES[dtypes.operands] + product.output_elements * BYTES[dtypes.result]
    if product.kind == "linear":
        weights_from = machine.level(weight_bytes)
        activations_from = machine.level(moved, beside=weight_bytes if weights_from == "l3" else 0)
    else:
        weights_from = activations_from = machine.level(weights + moved)
    by_level = [(weights, machine.bandwidth[weights_from]), (moved, machine.bandwidth[activations_from])]
    bandwidth = effective_bandwidth(by_level)
    peak, intensity = machine.operations[dtypes.operands], product.operations / (weights + moved)
    balance = balance_point(peak, bandwidth)
    return Point(
        product=product,
        dtype=dtypes.operands,
        bytes_moved=weights + moved,
        intensity=intensity,
        weights_from=weights_from,
        activations_from=activations_from,
        bandwidth=bandwidth,
        peak=peak,
        balance=balance,
        attainable=attainable(peak, intensity, bandwidth),
        bound="memory" if intensity < balance else "compute",
    )


def effective_bandwidth(parts: Iterable[tuple[int, float]]) -> float:
    """Bytes a second of ``parts`` (bytes, bytes a second) that are moved one after the other."""
    listed = list(parts)
    return sum(size for size, _ in listed) / sum(size / rate for size, rate in listed)


def balance_point(peak: float, bandwidth: float) -> float:
    """Operations a byte at which arithmetic (operations a second) and bandwidth (bytes a second) bound alike."""
    return peak / bandwidth


def attainable(peak: float, intensity: float, bandwidth: float) -> float:
    """Operations a second at most."""
    return min(peak, intensity * bandwidth)


def roof_seconds(points: Sequence[Point]) -> float:
    """Seconds that the calls of ``points`` in one forward pass take at their roofs."""
    return math.fsum(point.product.calls * point.product.operations / point.attainable for point in points)


# --- ceilings ---------------------------------------------------------------------------------------------------------


def amdahl(linear_share: float, linear_gain: float, rest_gain: float) -> float:
    """The speed-up if a share f of the time becomes g times faster and the rest h times: 1 / (f / g + (1 - f) / h).

    Raises:
        ValueError: f is no share, or g or h is not positive.
    """
    if not 0.0 <= linear_share <= 1.0 or linear_gain <= 0.0 or rest_gain <= 0.0:
        raise ValueError(f"no share and gains: f={linear_share}, g={linear_gain}, h={rest_gain}")
    return 1.0 / (linear_share / linear_gain + (1.0 - linear_share) / rest_gain)


def ceiling(
    *,
    linear_s: float,
    rest_s: float,
    baseline_roof_s: float,
    roof_s: float,
    rest_gain: float,
    speedup: float | None = None,
    linear_speedup: float | None = None,
) -> Ceiling:
    """The ceiling of a recipe over FP32.

    Args:
        linear_s, rest_s: FP32's time split, attention being part of the rest.
        baseline_roof_s, roof_s: seconds of all linears at their roofs, in FP32 and in the recipe.
        rest_gain: how much faster than FP32 the rest runs.
        speedup, linear_speedup: measured, over FP32.
    """
    share, gain = linear_s / (linear_s + rest_s), baseline_roof_s / roof_s
    return Ceiling(
        linear_share=share,
        linear_gain=gain,
        rest_gain=rest_gain,
        ceiling=amdahl(share, gain, rest_gain),
        at_roof=amdahl(share, linear_s / roof_s, rest_gain),
        speedup=speedup,
        linear_speedup=linear_speedup,
    )


# --- a profile's kernels as products ----------------------------------------------------------------------------------


def joint_layers(shape: EncoderShape, kernels: Iterable[Kernel]) -> int:
    """Layers whose query, key and value are one product, by the kernels of one pass."""
    width = 3 * shape.hidden
    if width == shape.intermediate:  # not to be told apart by size, and no model has it
        return 0
    found = ((kernel.calls, *_operands(kernel)) for kernel in kernels if kernel.kind == "linear")
    calls = [n for n, x, rest in found if x and x[-1] == shape.hidden and _holds_weight(rest, width, shape.hidden)]
    return min(sum(calls), shape.layers)


def seconds_of(products: Sequence[Product], kernels: Iterable[Kernel]) -> dict[str, float]:
    """Seconds of one call of each product, by label: the median over the kernels whose input shapes say that they are
    this product and no other. What no kernel computes is left out."""
    times: dict[str, list[float]] = {}
    for kernel in kernels:
        fitting = [product for product in products if _computes(kernel, product)]
        if len(fitting) == 1:
            times.setdefault(fitting[0].label, []).append(kernel.seconds)
    return {label: statistics.median(found) for label, found in times.items()}


def _computes(kernel: Kernel, product: Product) -> bool:
    if kernel.kind != product.kind:
        return False
    first, rest = _operands(kernel)
    if product.kind == "linear":
        fits = bool(first) and first[-1] == product.k and math.prod(first) == product.m * product.k
        return fits and _holds_weight(rest, product.n, product.k)
    if kernel.name in ("aten::bmm", "aten::baddbmm"):
        batched = [shape[-2:] for shape in kernel.shapes if len(shape) == 3 and shape[0] == product.batch]
        return not product.fused and batched[-2:] == [(product.m, product.k), (product.k, product.n)]
    # Query, key and value may come as one tensor.
    return product.fused and math.prod(first) in (product.input_elements, 3 * product.input_elements)


def _operands(kernel: Kernel) -> tuple[Shape, tuple[Shape, ...]]:
    """The input, which is the first argument with rows, and what tells of the weight; () where there is no input.

    Weights of our own kernels are packed into one dimension, so that what else has rows there is a residual.
    """
    place = next((place for place, shape in enumerate(kernel.shapes) if len(shape) > 1), None)
    if place is None:
        return (), kernel.shapes
    rest = kernel.shapes[:place] + kernel.shapes[place + 1 :]
    ours = kernel.name.startswith("int8::")
    return kernel.shapes[place], tuple(shape for shape in rest if len(shape) == 1) if ours else rest


def _holds_weight(shapes: Iterable[Shape], n: int, k: int) -> bool:
    """Whether ``shapes``, those after a linear's input, tell of a weight of n rows and k columns.

    It is there as such, turned, or packed (padded, with sums). Where the profiler shows no weight, because it is packed
    into something opaque, the first vector tells n: each of our kernels takes the weight's scales first.
    """
    listed = list(shapes)
    plain = [shape for shape in listed if len(shape) == 2]
    vectors = [shape[0] for shape in listed if len(shape) == 1]
    largest = 1.05 * (n + 15) * (k + 64)
    if any(sorted(shape) == sorted((n, k)) for shape in plain) or any(n * k <= size <= largest for size in vectors):
        return True
    return not plain and vectors[:1] == [n]
