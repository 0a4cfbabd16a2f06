"""Lowers the quantized linears of :mod:`int8.ops` to oneDNN's fused INT8 linear while Inductor freezes a graph.

Matches one node a linear, and writes:

    static      quantize (one fused elementwise loop with what produced x) -> qlinear (scales, bias and cast inside)
    dynamic     smooth, row maximum, quantize -> qlinear (weight scale) -> row scale and bias, fused with what follows;
                a scale for the whole tensor takes the maximum of all rows
    affine      the same with zero points of the activation: a calibrated one is the kernel's own, one a token costs a
                row minimum and one more product in the row's scaling
    zeropoint   extremes, affine quantize, sum of the levels of a row -> qlinear (bare accumulator) -> the products of
                the zero points, scale and bias, fused with what follows
    decomposed  outlier dimensions, zeroed and then as dynamic; the floating-point product of the outlier dimensions
                is added behind the row scale. Where calibration fixed the dimensions it is a plain matrix product of
                constant columns, else the operator ``int8::outlier_product``

On AMX activations are signed. Elsewhere oneDNN has fast kernels only for unsigned x signed, so levels are shifted by
128 and its zero point of 128 makes the packed weight carry 128 * sum_k W[n, k], computed once.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch._inductor.fx_passes.freezing_patterns import register_freezing_graph_pattern
from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node

from int8 import isa, ops

aten = torch.ops.aten
prims = torch.ops.prims


@dataclass
class FusionReport:
    """What one compilation did with the quantized linears of its graphs.

    ``calls`` counts the quantized linears that the graphs call (a layer may be called often), ``fused_calls`` those
    that became a fused kernel, and ``fused_weights`` names the distinct weights of these. ``attention_calls`` counts
    the attentions that were put into our kernel; 0 where the graph came compiled from Inductor's cache on disk.
    """

    graphs: int = 0
    calls: int = 0
    fused_calls: int = 0
    fused_weights: set[str] = field(default_factory=set)
    parts: Counter[str] = field(default_factory=Counter)
    attention_calls: int = 0

    @property
    def complete(self) -> bool:
        """True if every call became a fused kernel."""
        return self.fused_calls == self.calls


_report: ContextVar[FusionReport | None] = ContextVar("int8_fusion_report", default=None)


@contextlib.contextmanager
def reporting(report: FusionReport) -> Iterator[FusionReport]:
    """Gather into ``report`` what is compiled inside the ``with``."""
    token = _report.set(report)
    try:
        yield report
    finally:
        _report.reset(token)


def count_linears(graph: Graph) -> None:
    """Note every quantized linear of ``graph`` in the active report; call it before any is rewritten."""
    report = _report.get()
    if report is None:
        return
    report.graphs += 1
    nodes = [node for node in graph.nodes if node.op == "call_function" and node.target in _EMITTERS]
    report.calls += len(nodes)


def note_fused(linear: AnyLinear, *parts: str) -> None:
    """Note in the active report that one call of a quantized linear became a fused kernel, and what was fused in."""
    report = _report.get()
    if report is not None:
        report.fused_calls += 1
        report.fused_weights.add(f"{report.graphs}:{linear.qweight.name}")
        report.parts.update(parts)


def note_attention(count: int) -> None:
    """Note in the active report that ``count`` attentions run in our kernel."""
    report = _report.get()
    if report is not None:
        report.attention_calls += count


@dataclass(frozen=True)
class Linear:
    """Arguments of one ``int8::linear`` node, in the operator's order."""

    x: Node
    qweight: Node
    weight_scale: Node
    bias: Node | None
    act_multiplier: Node | None
    act_scale: Node | None
    out_dtype: torch.dtype
    act_per_tensor: bool = False
    act_shift: Node | None = None
    act_zero_point: Node | None = None
    act_affine: bool = False
    layout: str = "rows"
    weight_bits: int = 8

    @classmethod
    def of(cls, node: Node) -> Linear:
        """The arguments of ``node``."""
        return cls(*cast(tuple[Any, ...], node.args))

    def activation_key(self) -> tuple[Any, ...]:
        """Equal for linears whose activation has the same levels."""
        scales = (self.act_multiplier, self.act_scale, self.act_shift, self.act_zero_point)
        return (self.x, *scales, self.act_affine, self.act_per_tensor)


@dataclass(frozen=True)
class _Zeropoint:
    """Arguments of one ``int8::linear_zeropoint`` node, in the operator's order."""

    x: Node
    qweight: Node
    weight_scale: Node
    weight_zero_point: Node
    bias: Node | None
    out_dtype: torch.dtype


@dataclass(frozen=True)
class _Decomposed:
    """Arguments of one ``int8::linear_decomposed`` node, in the operator's order."""

    x: Node
    qweight: Node
    weight_scale: Node
    bias: Node | None
    outlier_weight: Node | None
    outlier_index: Node | None
    outlier_threshold: float
    outlier_dtype: torch.dtype
    out_dtype: torch.dtype


AnyLinear = Linear | _Zeropoint | _Decomposed


def _lower(match: Match, *args: Any, **kwargs: Any) -> None:
    """Handler of the pattern: replace the matched node."""
    node = match.output_node()
    arguments, emit = _EMITTERS[node.target]
    linear = arguments(*cast(tuple[Any, ...], node.args))
    if linear.out_dtype not in (torch.float32, torch.bfloat16):
        return  # oneDNN's kernel writes no other dtype; the node stays and is counted as not fused
    with node.graph.inserting_before(node):
        result = emit(Emitter(node.graph, unsigned=isa.effective() != "amx"), linear)
    note_fused(linear)
    node.replace_all_uses_with(result)
    result.meta.update(node.meta)
    node.graph.erase_node(node)


@dataclass(frozen=True)
class Emitter:
    """Writes the nodes of one lowered linear at the graph's insertion point."""

    graph: Graph
    unsigned: bool

    def linear(self, linear: Linear) -> Node:
        if linear.act_affine:
            return self._affine_static(linear) if linear.act_scale is not None else self._affine_dynamic(linear)
        if linear.act_scale is not None:
            return self._static(linear, linear.act_scale)
        return self._dynamic(linear)

    def _static(self, linear: Linear, act_scale: Node) -> Node:
        levels = self._levels(self.scaled(linear, act_scale))
        return self._product(levels, linear, act_scale, linear.bias, linear.out_dtype)

    def _affine_static(self, linear: Linear) -> Node:
        act_scale, zero_node = cast(Node, linear.act_scale), cast(Node, linear.act_zero_point)
        zero_point = int(self._number(zero_node))
        rounded = self.call(aten.round.default, self.scaled(linear, act_scale))
        levels = self.full_range(self.call(aten.add.Tensor, rounded, float(zero_point)))
        return self._product(self.to_kernel(levels), linear, act_scale, linear.bias, linear.out_dtype, zero_point)

    def _affine_dynamic(self, linear: Linear) -> Node:
        levels, row_scale, zero_point = self.affine_rows(self.smoothed(linear))
        product = self._product(levels, linear, None, None, torch.float32)
        column_sum = self.call(aten.sum.dim_IntList, self.to_float(self._rows(linear)), [1])
        column_sum = self.call(aten.mul.Tensor, column_sum, linear.weight_scale)  # a constant: freezing folds it
        product = self.call(aten.sub.Tensor, product, self.call(aten.mul.Tensor, zero_point, column_sum))
        return self._finished(self.call(aten.mul.Tensor, product, row_scale), linear)

    def affine_rows(self, value: Node) -> tuple[Node, Node, Node]:
        """Levels of ``value`` with one scale and zero point a token, both (..., 1) FP32."""
        low = self.call(aten.clamp_max.default, self.call(aten.amin.default, value, [-1], True), 0.0)
        high = self.call(aten.clamp_min.default, self.call(aten.amax.default, value, [-1], True), 0.0)
        spread = self.call(aten.clamp_min.default, self.call(aten.sub.Tensor, high, low), ops.MIN_ABSMAX)
        inverse = self._inverse(spread, float(ops.AFFINE_STEPS))
        below = self.call(aten.round.default, self.call(aten.mul.Tensor, self.call(aten.neg.default, low), inverse))
        zero_point = self.call(aten.sub.Tensor, below, float(ops.UNSIGNED_SHIFT))
        rounded = self.call(aten.round.default, self.call(aten.mul.Tensor, value, inverse))
        levels = self.to_kernel(self.full_range(self.call(aten.add.Tensor, rounded, zero_point)))
        return levels, self.call(aten.mul.Tensor, spread, 1.0 / ops.AFFINE_STEPS), zero_point

    def scaled(self, linear: Linear, act_scale: Node) -> Node:
        """The input in units of the calibrated scale, not rounded."""
        inverse = self.call(aten.reciprocal.default, act_scale)
        if linear.act_multiplier is not None:
            inverse = self.call(aten.div.Tensor, linear.act_multiplier, act_scale)
        return self.call(aten.mul.Tensor, self._shifted(linear), inverse)

    def smoothed(self, linear: Linear) -> Node:
        value = self._shifted(linear)
        if linear.act_multiplier is None:
            return value
        return self.call(aten.mul.Tensor, value, linear.act_multiplier)

    def _shifted(self, linear: Linear) -> Node:
        value = self.to_float(linear.x)
        return value if linear.act_shift is None else self.call(aten.sub.Tensor, value, linear.act_shift)

    def full_range(self, levels: Node) -> Node:
        above = self.call(aten.clamp_min.default, levels, float(-ops.UNSIGNED_SHIFT))
        return self.call(aten.clamp_max.default, above, float(ops.AFFINE_STEPS - ops.UNSIGNED_SHIFT))

    def _dynamic(self, linear: Linear) -> Node:
        dims = _every_dim(linear.x) if linear.act_per_tensor else [-1]
        return self._finished(self._scaled_by_row(self.smoothed(linear), linear, dims), linear)

    def _scaled_by_row(self, value: Node, linear: Linear | _Decomposed, dims: list[int]) -> Node:
        """The FP32 product of ``value``, quantized with the maximum over ``dims``, without bias."""
        levels, scale = self.symmetric(value, dims)
        # The accumulator is scaled by row outside the kernel, in FP32: oneDNN takes one activation scale a tensor.
        product = self._product(levels, linear, None, None, torch.float32)
        return self.call(aten.mul.Tensor, product, scale)

    def symmetric(self, value: Node, dims: list[int]) -> tuple[Node, Node]:
        """Levels of ``value`` with one scale for the maximum over ``dims``, and the scale (dims kept), FP32."""
        absmax = self.call(aten.amax.default, self.call(aten.abs.default, value), dims, True)
        absmax = self.call(aten.clamp_min.default, absmax, ops.MIN_ABSMAX)
        to_level = self.call(aten.mul.Tensor, self.call(aten.reciprocal.default, absmax), float(ops.ACT_LEVELS))
        levels = self._levels(self.call(aten.mul.Tensor, value, to_level))
        return levels, self.call(aten.mul.Tensor, absmax, 1.0 / ops.ACT_LEVELS)

    def _finished(self, result: Node, linear: AnyLinear) -> Node:
        """``result`` with the bias, in the linear's dtype."""
        if linear.bias is not None:
            result = self.call(aten.add.Tensor, result, linear.bias)
        return self.call(prims.convert_element_type.default, result, linear.out_dtype)

    def zeropoint(self, linear: _Zeropoint) -> Node:
        value = self.to_float(linear.x)
        scaled, scale, zero_point = self._affine(value, _every_dim(linear.x))
        levels = self.clipped(self.call(aten.add.Tensor, self.call(aten.round.default, scaled), zero_point))
        # Sums of whole numbers below 2**24: exact in FP32.
        row_sum = self.call(aten.sum.dim_IntList, levels, [-1], True)
        column_sum = self.call(aten.sum.dim_IntList, self.to_float(linear.qweight), [1])
        weight_zero = self.call(prims.convert_element_type.default, linear.weight_zero_point, torch.float32)
        inner = linear.qweight.meta["val"].shape[1]
        product = self._product(self.to_kernel(levels), linear, None, None, torch.float32)
        product = self.call(aten.sub.Tensor, product, self.call(aten.mul.Tensor, column_sum, zero_point))
        of_row = self.call(aten.sub.Tensor, self.call(aten.mul.Tensor, zero_point, float(inner)), row_sum)
        product = self.call(aten.add.Tensor, product, self.call(aten.mul.Tensor, of_row, weight_zero))
        factor = self.call(aten.mul.Tensor, scale, linear.weight_scale)
        return self._finished(self.call(aten.mul.Tensor, product, factor), linear)

    def _affine(self, value: Node, dims: list[int]) -> tuple[Node, Node, Node]:
        """``value`` in levels (not rounded), scale and zero point, FP32; as :func:`int8.ops.quantize_affine`."""
        low = self.call(aten.amin.default, value, dims, True)
        high = self.call(aten.amax.default, value, dims, True)
        spread = self.call(aten.clamp_min.default, self.call(aten.sub.Tensor, high, low), ops.MIN_ABSMAX)
        spread = self.call(aten.clamp_max.default, spread, torch.finfo(torch.float32).max)
        furthest = self.call(aten.maximum.default, self.call(aten.neg.default, low), high)
        furthest = self.call(aten.clamp_min.default, furthest, ops.MIN_ABSMAX)
        by_spread = self._inverse(spread, 2.0 * ops.ACT_LEVELS)
        by_distance = self._inverse(furthest, float(ops.MAX_ZERO_POINT - ops.ACT_LEVELS))
        dynamic_range = self.call(aten.minimum.default, by_spread, by_distance)
        lowest = self.call(aten.round.default, self.call(aten.mul.Tensor, dynamic_range, low))
        zero_point = self.call(aten.neg.default, self.call(aten.add.Tensor, lowest, float(ops.ACT_LEVELS)))
        scaled = self.call(aten.mul.Tensor, value, dynamic_range)
        return scaled, self.call(aten.reciprocal.default, dynamic_range), zero_point

    def _inverse(self, value: Node, numerator: float) -> Node:
        return self.call(aten.mul.Tensor, self.call(aten.reciprocal.default, value), numerator)

    def decomposed(self, linear: _Decomposed) -> Node:
        value = self.to_float(linear.x)
        outliers: Node | None
        if linear.outlier_index is None:
            rest, outliers = self._outliers_of_call(value, linear)
        else:
            rest, outliers = self._fixed_outliers(value, linear, linear.outlier_index)
        result = self._scaled_by_row(rest, linear, [-1])
        if outliers is not None:
            outliers = self.call(prims.convert_element_type.default, outliers, torch.float32)
            result = self.call(aten.add.Tensor, result, outliers)
        return self._finished(result, linear)

    def _outliers_of_call(self, value: Node, linear: _Decomposed) -> tuple[Node, Node]:
        """``value`` with this call's outlier dimensions zeroed, and the product of those."""
        largest = self.call(aten.abs.default, value)
        tokens = _every_dim(linear.x)[:-1]
        if tokens:
            largest = self.call(aten.amax.default, largest, tokens)
        is_outlier = self.call(aten.ge.Scalar, largest, linear.outlier_threshold)
        rest = self.call(aten.where.ScalarSelf, is_outlier, 0.0, value)
        arguments = (is_outlier, linear.outlier_weight, linear.qweight, linear.weight_scale, linear.outlier_dtype)
        return rest, self.call(torch.ops.int8.outlier_product.default, linear.x, *arguments)

    def _fixed_outliers(self, value: Node, linear: _Decomposed, index: Node) -> tuple[Node, Node | None]:
        """The same with the dimensions that ``index`` names; nothing to add where it names none."""
        shape = linear.x.meta["val"].shape
        if not index.meta["val"].numel():
            return value, None
        # Not a product with 0: a dimension that is left out must not reach the maximum as NaN or infinity either.
        rest = self.call(aten.where.ScalarSelf, self._mask(index, int(shape[-1])), 0.0, value)
        columns = linear.outlier_weight
        if columns is None:
            levels = self.call(aten.index.Tensor, linear.qweight, [None, index])
            columns = self.call(aten.mul.Tensor, levels, self.call(aten.unsqueeze.default, linear.weight_scale, 1))
            columns = self.call(prims.convert_element_type.default, columns, linear.outlier_dtype)
        factors = self.call(aten.index.Tensor, linear.x, [None] * (len(shape) - 1) + [index])
        factors = self.call(prims.convert_element_type.default, factors, linear.outlier_dtype)
        rows = self.call(aten.reshape.default, factors, [-1, index.meta["val"].numel()])
        product = self.call(aten.mm.default, rows, self.call(aten.permute.default, columns, [1, 0]))
        return rest, self.call(aten.reshape.default, product, [*shape[:-1], linear.qweight.meta["val"].shape[0]])

    def _levels(self, scaled: Node) -> Node:
        return self.to_kernel(self.clipped(self.call(aten.round.default, scaled)))

    def clipped(self, rounded: Node) -> Node:
        above = self.call(aten.clamp_min.default, rounded, float(-ops.ACT_LEVELS))
        return self.call(aten.clamp_max.default, above, float(ops.ACT_LEVELS))

    def to_kernel(self, clipped: Node) -> Node:
        """Levels in the integer type that the kernel takes."""
        if not self.unsigned:
            return self.call(prims.convert_element_type.default, clipped, torch.int8)
        shifted = self.call(aten.add.Tensor, clipped, float(ops.UNSIGNED_SHIFT))
        return self.call(prims.convert_element_type.default, shifted, torch.uint8)

    def _product(
        self,
        levels: Node,
        linear: AnyLinear,
        act_scale: Node | None,
        bias: Node | None,
        out_dtype: torch.dtype,
        zero_point: int = 0,
    ) -> Node:
        packed = self.call(torch.ops.onednn.qlinear_prepack.default, self._rows(linear), _static_shape(linear.x))
        scale = 1.0 if act_scale is None else self._number(act_scale)
        weight_scale = self._ones(linear.qweight) if isinstance(linear, _Zeropoint) else linear.weight_scale
        return self.call(
            torch.ops.onednn.qlinear_pointwise.default,
            levels,
            scale,
            zero_point + (ops.UNSIGNED_SHIFT if self.unsigned else 0),
            packed,
            weight_scale,
            None,
            bias,
            1.0,
            0,
            out_dtype,
            "none",
            [],
            "",
        )

    def _rows(self, linear: AnyLinear) -> Node:
        """(N, K) levels; a weight that was packed for our kernels is unpacked once, by freezing."""
        if not isinstance(linear, Linear) or linear.layout == "rows":
            return linear.qweight
        rows, inner = linear.weight_scale.meta["val"].shape[0], linear.x.meta["val"].shape[-1]
        return self.call(torch.ops.int8.unpack.default, linear.qweight, rows, inner, linear.layout)

    def to_float(self, node: Node) -> Node:
        value = node.meta.get("val")  # a node that was written just now has none
        if value is not None and value.dtype == torch.float32:
            return node
        return self.call(prims.convert_element_type.default, node, torch.float32)

    def _number(self, node: Node) -> float:
        """The value that freezing gave the one-element constant ``node``."""
        with unset_fake_temporarily():
            return float(cast(torch.Tensor, getattr(self.graph.owning_module, str(node.target))).item())

    def _ones(self, qweight: Node) -> Node:
        """(N,) FP32 scales of 1, for the bare accumulator."""
        rows = int(qweight.meta["val"].shape[0])
        with unset_fake_temporarily():
            return self._constant(f"_int8_ones_{rows}", torch.ones(rows))

    def _mask(self, index: Node, size: int) -> Node:
        """(size,) bool, true at the dimensions that the constant ``index`` names."""
        with unset_fake_temporarily():
            named = cast(torch.Tensor, getattr(self.graph.owning_module, str(index.target)))
            mask = torch.zeros(size, dtype=torch.bool).index_fill_(0, named, True)
            return self._constant(f"_int8_outliers_{index.target}", mask)

    def _constant(self, name: str, value: torch.Tensor) -> Node:
        """A node for the constant ``value``, kept in the graph's module under ``name``."""
        module = cast(torch.nn.Module, self.graph.owning_module)
        if not hasattr(module, name):
            module.register_buffer(name, value)
        return self.graph.get_attr(name)

    def call(self, target: Any, *args: Any) -> Node:
        return self.graph.call_function(target, args)


def _static_shape(x: Node) -> list[int] | None:
    """The activation's shape, for oneDNN to choose the packed layout by; None where a size is symbolic."""
    shape = x.meta["val"].shape
    return [int(size) for size in shape] if all(isinstance(size, int) for size in shape) else None


def _every_dim(x: Node) -> list[int]:
    return list(range(x.meta["val"].ndim))


#: Operator -> how its arguments are named, and what writes its lowered form.
_EMITTERS: dict[Any, tuple[Callable[..., Any], Callable[[Emitter, Any], Node]]] = {
    torch.ops.int8.linear.default: (Linear, Emitter.linear),
    torch.ops.int8.linear_zeropoint.default: (_Zeropoint, Emitter.zeropoint),
    torch.ops.int8.linear_decomposed.default: (_Decomposed, Emitter.decomposed),
}

for _operator in _EMITTERS:
    register_freezing_graph_pattern(  # type: ignore[no-untyped-call]
        CallFunctionVarArgs(_operator), pass_number=0
    )(_lower)
