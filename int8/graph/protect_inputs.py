"""Keeps a compiled model from writing into the caller's tensors.

Inductor fuses ``linear + residual`` by letting oneDNN add into the residual's memory. It checks that nothing reads the
residual afterwards, but not that the residual may be the graph's own input, which belongs to the caller (seen in torch
2.13: a model whose first layer adds to its input changes that input). Such an input is copied first, by an
operator of ours, because Inductor removes ``aten.clone`` as doing nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from int8 import ops as ops

aten = torch.ops.aten
_ACCUMULATING = (torch.ops.onednn.qlinear_pointwise.binary, torch.ops.onednn.qlinear_pointwise.binary_tensor)
_ACCUMULATOR = 6  # position of the tensor that the operator adds, and overwrites where its post-op is "sum"
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


class ProtectInputs(CustomGraphPass):
    """Copies a graph input that a fused linear would accumulate into; runs on the frozen graph."""

    def __call__(self, graph: Graph) -> None:
        for node in [node for node in graph.nodes if node.target in _ACCUMULATING]:
            accumulator = node.args[_ACCUMULATOR]
            if _origin(accumulator).op == "placeholder":
                node.update_arg(_ACCUMULATOR, _copy_before(node, accumulator))

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _origin(node: Node) -> Node:
    """The node whose memory ``node`` shows."""
    while node.target in _VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _copy_before(node: Node, operand: Node) -> Node:
    with node.graph.inserting_before(node):
        copy = node.graph.call_function(torch.ops.int8.own.default, (operand,))
    copy.meta.update(operand.meta)
    return copy
