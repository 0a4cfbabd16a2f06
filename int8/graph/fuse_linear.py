"""Replaces quantized linears by kernels of our own, with all that they can do around the product.

Runs on the joint graph, before anything is folded or split up. For each ``int8::linear`` it finds

    producers   linears that read one tensor with one set of scales (query, key, value) become one call, and its
                activation is quantized once
    epilogues   GELU, ReLU and residual additions behind the product
    consumers   a static linear that alone reads the result: its levels are written instead of floating point

chooses a kernel for the product with them (:mod:`int8.kernels.selection`) and writes ``int8::gemm``. Linears for which
oneDNN is chosen stay as they are; :mod:`int8.graph.lower_linear` lowers them later. Quantization itself stays
elementwise code: Inductor makes one loop of it and of what produced the activation, as a LayerNorm with two outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._guards import detect_fake_mode
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from int8 import isa
from int8.graph import epilogue
from int8.graph.epilogue import Epilogue
from int8.graph.lower_linear import Emitter, Linear, count_linears, note_fused
from int8.kernels import selection
from int8.kernels.selection import ONEDNN, Problem

aten = torch.ops.aten
prims = torch.ops.prims

_LINEAR = torch.ops.int8.linear.default


class FuseLinears(CustomGraphPass):
    """Notes the quantized linears of a graph in the active report, then gives ours their kernels."""

    def __call__(self, graph: Graph) -> None:
        count_linears(graph)
        use_own_kernels(graph)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__, epilogue.__file__, selection.__file__))


@dataclass(frozen=True)
class _Site:
    """One quantized linear of the graph and what can be fused into it."""

    node: Node
    linear: Linear
    epilogue: Epilogue
    feeds: Node | None = None  # the static linear that alone reads the result

    @property
    def plain(self) -> bool:
        return self.epilogue.last is self.node and self.feeds is None


def use_own_kernels(graph: Graph) -> int:
    """Rewrite ``graph`` in place; returns how many linears became calls of our kernels."""
    nodes = [node for node in graph.nodes if node.target is _LINEAR and _eligible(node)]
    if not nodes:
        return 0
    groups = list(_groups([_site(node, set(nodes)) for node in nodes]))
    kernels = [_choose(group) for group in groups]
    own = {site.node for group, kernel in zip(groups, kernels, strict=True) if kernel != ONEDNN for site in group}
    writer = _Writer(graph)
    for group, kernel in zip(groups, kernels, strict=True):
        if kernel != ONEDNN:
            writer.write([_fed_by_own(site, own) for site in group], kernel)
    graph.eliminate_dead_code()
    _propagate(graph)
    return len(own)


def _eligible(node: Node) -> bool:
    linear = Linear.of(node)
    return linear.layout != "rows" and linear.out_dtype in (torch.float32, torch.bfloat16)


def _site(node: Node, eligible: set[Node]) -> _Site:
    linear = Linear.of(node)
    if linear.act_scale is None and linear.act_per_tensor:
        return _Site(node, linear, Epilogue("none", None, node))  # scaled behind the kernel, and only then finished
    found = epilogue.find(node)
    end = epilogue.behind_conversions(found.last)
    reader = epilogue.only_user(end)
    feeds = (
        reader is not None and reader in eligible and reader.args[0] is end and Linear.of(reader).act_scale is not None
    )
    return _Site(node, Linear.of(node), found, reader if feeds else None)


def _fed_by_own(site: _Site, own: set[Node]) -> _Site:
    """``site`` without a consumer that oneDNN runs: it quantizes its input itself."""
    return site if site.feeds is None or site.feeds in own else _Site(site.node, site.linear, site.epilogue)


def _groups(sites: Iterable[_Site]) -> Iterator[list[_Site]]:
    """Sites in the graph's order; those that one call can compute together, at the place of the first."""
    joint: dict[Any, list[_Site]] = {}
    for site in sites:
        joint.setdefault(_joint_key(site), []).append(site)
    yield from joint.values()


def _joint_key(site: _Site) -> Any:
    linear = site.linear
    constants = (linear.qweight, linear.weight_scale, linear.bias)
    if not site.plain or any(one is not None and one.op not in ("placeholder", "get_attr") for one in constants):
        return site.node
    return (*linear.activation_key(), linear.out_dtype, linear.weight_bits, linear.bias is None)


def _choose(group: list[_Site]) -> str:
    first = group[0].linear
    shape = first.x.meta["val"].shape
    rows = math.prod(shape[:-1])
    names = selection.own_kernels(isa.effective(), first.weight_bits)
    if not isinstance(rows, int) or not isinstance(shape[-1], int):
        return names[0]  # symbolic sizes cannot be measured
    columns = sum(_columns(site.linear) for site in group)
    problem = Problem(rows, columns, int(shape[-1]), _label(group[0]), str(first.out_dtype).removeprefix("torch."))
    return selection.choose(problem, isa.effective(), first.weight_bits).kernel


def _columns(linear: Linear) -> int:
    return int(linear.weight_scale.meta["val"].shape[0])


def _label(site: _Site) -> str:
    residual = "+residual" if site.epilogue.residual is not None else ""
    return f"{site.epilogue.post}{residual}{'+int8' if site.feeds is not None else ''}"


def _parts(site: _Site, group: list[_Site]) -> list[str]:
    """What the kernel of ``site`` does beside the product, in the report's words."""
    found = {
        "joint": len(group) > 1,
        site.epilogue.post: site.epilogue.post != "none",
        "residual": site.epilogue.residual is not None,
        "int8": site.feeds is not None,
    }
    return [name for name, there in found.items() if there]


@dataclass(frozen=True)
class _Activation:
    """A quantized activation: levels, and what turns accumulators into numbers beside the weight scales."""

    levels: Node
    act_scale: Node | None = None  # () of the whole tensor, calibrated
    zero_point: Node | None = None
    row_scale: Node | None = None  # (..., 1) computed
    row_zero_point: Node | None = None
    total_scale: Node | None = None  # one for the whole tensor, computed: applied behind the kernel


@dataclass(frozen=True)
class _Output:
    """What a call does with its products; the fields from ``inverse`` on describe levels for the next linear."""

    dtype: torch.dtype
    post: str = "none"
    residual: Node | None = None
    inverse: Node | None = None  # (N,) factor
    shift: Node | None = None  # (N,) subtracted first
    zero_point: Node | None = None
    full_range: bool = False  # whether -128 is a level


class _Writer:
    """Writes the calls of a graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._emit = Emitter(graph, unsigned=False)
        self._levels: dict[Node, Node] = {}  # linear -> levels that another kernel wrote for it
        self._activations: dict[Any, _Activation] = {}
        self._replaced: dict[Node, Node] = {}

    def write(self, group: list[_Site], kernel: str) -> None:
        """One call for all sites of ``group``."""
        group = [self._current(site) for site in group]
        first = group[0]
        with self._graph.inserting_before(first.node):
            activation = self._activation(first)
        with self._graph.inserting_before(first.epilogue.last):
            result = self._gemm(group, activation, kernel)
            parts = self._split(result, group)
        for site, part in zip(group, parts, strict=True):
            note_fused(site.linear, *_parts(site, group))
            if site.feeds is None:
                site.epilogue.last.replace_all_uses_with(part)
                self._replaced[site.epilogue.last] = part
            else:
                self._levels[site.feeds] = part

    def _current(self, site: _Site) -> _Site:
        """``site`` with operands as they are now, where earlier calls have replaced what it was found with."""
        found = site.epilogue
        residual = None if found.residual is None else self._replaced.get(found.residual, found.residual)
        current = Epilogue(found.post, residual, found.last)
        return _Site(site.node, Linear.of(site.node), current, site.feeds)

    def _activation(self, site: _Site) -> _Activation:
        linear = site.linear
        if site.node in self._levels:
            return _Activation(self._levels[site.node], linear.act_scale, _calibrated_zero(linear))
        key = linear.activation_key()
        if key not in self._activations:
            self._activations[key] = self._quantize(linear)
        return self._activations[key]

    def _quantize(self, linear: Linear) -> _Activation:
        emit = self._emit
        if linear.act_scale is not None:
            rounded = emit.call(aten.round.default, emit.scaled(linear, linear.act_scale))
            if not linear.act_affine:
                return _Activation(emit.to_kernel(emit.clipped(rounded)), linear.act_scale)
            zero = emit.to_float(cast(Node, linear.act_zero_point))
            levels = emit.full_range(emit.call(aten.add.Tensor, rounded, zero))
            return _Activation(emit.to_kernel(levels), linear.act_scale, linear.act_zero_point)
        value = emit.smoothed(linear)
        if linear.act_affine:
            levels, row_scale, row_zero = emit.affine_rows(value)
            return _Activation(levels, row_scale=row_scale, row_zero_point=row_zero)
        dims = list(range(linear.x.meta["val"].ndim)) if linear.act_per_tensor else [-1]
        levels, scale = emit.symmetric(value, dims)
        if linear.act_per_tensor:
            return _Activation(levels, total_scale=scale)
        return _Activation(levels, row_scale=scale)

    def _gemm(self, group: list[_Site], activation: _Activation, kernel: str) -> Node:
        first, emit = group[0], self._emit
        scale = self._joined([site.linear.weight_scale for site in group])
        if activation.act_scale is not None:
            scale = emit.call(aten.mul.Tensor, scale, activation.act_scale)  # constants: freezing folds them
        biases = [emit.to_float(site.linear.bias) for site in group if site.linear.bias is not None]
        bias = self._joined(biases) if biases else None
        if activation.total_scale is not None:
            return self._scaled_behind(group, activation, scale, bias, kernel)
        return self._call(group, activation, scale, bias, kernel, self._output(first))

    def _scaled_behind(
        self, group: list[_Site], activation: _Activation, scale: Node, bias: Node | None, kernel: str
    ) -> Node:
        """One computed scale for the whole tensor: the kernel writes products, the rest is elementwise."""
        emit, first = self._emit, group[0]
        result = self._call(group, activation, scale, None, kernel, _Output(torch.float32))
        result = emit.call(aten.mul.Tensor, result, cast(Node, activation.total_scale))
        if bias is not None:
            result = emit.call(aten.add.Tensor, result, bias)
        return emit.call(prims.convert_element_type.default, result, first.linear.out_dtype)

    def _call(
        self,
        group: list[_Site],
        activation: _Activation,
        scale: Node,
        bias: Node | None,
        kernel: str,
        output: _Output,
    ) -> Node:
        return self._emit.call(
            torch.ops.int8.gemm.default,
            activation.levels,
            [site.linear.qweight for site in group],
            [_columns(site.linear) for site in group],
            scale,
            bias,
            activation.row_scale,
            activation.row_zero_point,
            activation.zero_point,
            output.post,
            output.residual,
            output.inverse,
            output.shift,
            output.zero_point,
            output.full_range,
            output.dtype,
            kernel,
        )

    def _output(self, site: _Site) -> _Output:
        found, emit = site.epilogue, self._emit
        if site.feeds is None:
            return _Output(found.dtype, found.post, found.residual)
        reader = Linear.of(site.feeds)
        act_scale = cast(Node, reader.act_scale)
        if reader.act_multiplier is not None:
            inverse = emit.call(aten.div.Tensor, reader.act_multiplier, act_scale)
        else:
            ones = emit.call(aten.full.default, [_columns(site.linear)], 1.0)
            inverse = emit.call(aten.div.Tensor, ones, act_scale)
        point = _calibrated_zero(reader)
        return _Output(torch.int8, found.post, found.residual, inverse, reader.act_shift, point, reader.act_affine)

    def _joined(self, vectors: list[Node]) -> Node:
        return vectors[0] if len(vectors) == 1 else self._emit.call(aten.cat.default, vectors)

    def _split(self, result: Node, group: list[_Site]) -> list[Node]:
        if len(group) == 1:
            return [result]
        parts, column = [], 0
        for site in group:
            end = column + _columns(site.linear)
            parts.append(self._emit.call(aten.slice.Tensor, result, -1, column, end))
            column = end
        return parts


def _calibrated_zero(linear: Linear) -> Node | None:
    return linear.act_zero_point if linear.act_affine else None


def _propagate(graph: Graph) -> None:
    """Give every node the shape, dtype and strides that it has now; later passes read them."""
    module = cast(torch.fx.GraphModule, graph.owning_module)
    inputs = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
    mode = detect_fake_mode(inputs)
    module.recompile()
    FakeTensorProp(module, mode).propagate_dont_convert_inputs(*inputs)
