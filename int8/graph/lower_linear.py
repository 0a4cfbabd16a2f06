"""Lowers ``int8::linear`` to oneDNN's fused INT8 linear while Inductor freezes a graph.

Matches one node, whatever the recipe, and writes:

    static    quantize (one fused elementwise loop with what produced x) -> qlinear (scales, bias and cast inside)
    dynamic   smooth, row maximum, quantize -> qlinear (weight scale) -> row scale and bias, fused with what follows

On AMX activations are signed. Elsewhere oneDNN has fast kernels only for unsigned x signed, so levels are shifted by
128 and its zero point of 128 makes the packed weight carry 128 * sum_k W[n, k], computed once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
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

    ``linears`` counts the distinct weights that the graphs multiply, ``calls`` their uses (a layer may be called
    often); ``fused_weights`` and ``fused_calls`` are those that became a fused kernel.
    """

    graphs: int = 0
    linears: int = 0
    calls: int = 0
    fused_calls: int = 0
    fused_weights: set[str] = field(default_factory=set)

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


class CountLinears(CustomGraphPass):
    """Runs before freezing and notes every ``int8::linear`` of a graph in the active report."""

    def __call__(self, graph: Graph) -> None:
        report = _report.get()
        if report is None:
            return
        report.graphs += 1
        nodes = graph.find_nodes(op="call_function", target=torch.ops.int8.linear.default)
        report.calls += len(nodes)
        report.linears += len({node.args[1] for node in nodes})

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


@dataclass(frozen=True)
class _Linear:
    """Arguments of one ``int8::linear`` node, in the operator's order."""

    x: Node
    qweight: Node
    weight_scale: Node
    bias: Node | None
    act_multiplier: Node | None
    act_scale: Node | None
    out_dtype: torch.dtype


def _lower(match: Match, *args: Any, **kwargs: Any) -> None:
    """Handler of the pattern: replace the matched node."""
    node = match.output_node()
    linear = _Linear(*cast(tuple[Any, ...], node.args))
    if linear.out_dtype not in (torch.float32, torch.bfloat16):
        return  # oneDNN's kernel writes no other dtype; the node stays and is counted as not fused
    with node.graph.inserting_before(node):
        result = _Emitter(node.graph, unsigned=isa.effective() != "amx").linear(linear)
    report = _report.get()
    if report is not None:
        report.fused_calls += 1
        report.fused_weights.add(f"{report.graphs}:{linear.qweight.name}")
    node.replace_all_uses_with(result)
    result.meta.update(node.meta)
    node.graph.erase_node(node)


@dataclass(frozen=True)
class _Emitter:
    """Writes the nodes of one lowered linear at the graph's insertion point."""

    graph: Graph
    unsigned: bool

    def linear(self, linear: _Linear) -> Node:
        if linear.act_scale is not None:
            return self._static(linear, linear.act_scale)
        return self._dynamic(linear)

    def _static(self, linear: _Linear, act_scale: Node) -> Node:
        inverse = self.call(aten.reciprocal.default, act_scale)
        if linear.act_multiplier is not None:
            inverse = self.call(aten.div.Tensor, linear.act_multiplier, act_scale)
        levels = self._levels(self.call(aten.mul.Tensor, self._float(linear.x), inverse))
        return self._product(levels, linear, act_scale, linear.bias, linear.out_dtype)

    def _dynamic(self, linear: _Linear) -> Node:
        value = self._float(linear.x)
        if linear.act_multiplier is not None:
            value = self.call(aten.mul.Tensor, value, linear.act_multiplier)
        absmax = self.call(aten.amax.default, self.call(aten.abs.default, value), [-1], True)
        absmax = self.call(aten.clamp_min.default, absmax, ops.MIN_ABSMAX)
        to_level = self.call(aten.mul.Tensor, self.call(aten.reciprocal.default, absmax), float(ops.ACT_LEVELS))
        levels = self._levels(self.call(aten.mul.Tensor, value, to_level))
        # The accumulator is scaled by row outside the kernel, in FP32: oneDNN takes one activation scale a tensor.
        product = self._product(levels, linear, None, None, torch.float32)
        row_scale = self.call(aten.mul.Tensor, absmax, 1.0 / ops.ACT_LEVELS)
        result = self.call(aten.mul.Tensor, product, row_scale)
        if linear.bias is not None:
            result = self.call(aten.add.Tensor, result, linear.bias)
        return self.call(prims.convert_element_type.default, result, linear.out_dtype)

    def _levels(self, scaled: Node) -> Node:
        rounded = self.call(aten.round.default, scaled)
        above = self.call(aten.clamp_min.default, rounded, float(-ops.ACT_LEVELS))
        clipped = self.call(aten.clamp_max.default, above, float(ops.ACT_LEVELS))
        if not self.unsigned:
            return self.call(prims.convert_element_type.default, clipped, torch.int8)
        shifted = self.call(aten.add.Tensor, clipped, float(ops.UNSIGNED_SHIFT))
        return self.call(prims.convert_element_type.default, shifted, torch.uint8)

    def _product(
        self, levels: Node, linear: _Linear, act_scale: Node | None, bias: Node | None, out_dtype: torch.dtype
    ) -> Node:
        packed = self.call(torch.ops.onednn.qlinear_prepack.default, linear.qweight, _static_shape(linear.x))
        scale = 1.0 if act_scale is None else self._number(act_scale)
        return self.call(
            torch.ops.onednn.qlinear_pointwise.default,
            levels,
            scale,
            ops.UNSIGNED_SHIFT if self.unsigned else 0,
            packed,
            linear.weight_scale,
            None,
            bias,
            1.0,
            0,
            out_dtype,
            "none",
            [],
            "",
        )

    def _float(self, node: Node) -> Node:
        if node.meta["val"].dtype == torch.float32:
            return node
        return self.call(prims.convert_element_type.default, node, torch.float32)

    def _number(self, node: Node) -> float:
        """The value that freezing gave the one-element constant ``node``."""
        with unset_fake_temporarily():
            return float(cast(torch.Tensor, getattr(self.graph.owning_module, str(node.target))).item())

    def call(self, target: Any, *args: Any) -> Node:
        return self.graph.call_function(target, args)


def _static_shape(x: Node) -> list[int] | None:
    """The activation's shape, for oneDNN to choose the packed layout by; None where a size is symbolic."""
    shape = x.meta["val"].shape
    return [int(size) for size in shape] if all(isinstance(size, int) for size in shape) else None


register_freezing_graph_pattern(  # type: ignore[no-untyped-call]
    CallFunctionVarArgs(torch.ops.int8.linear.default), pass_number=0
)(_lower)
