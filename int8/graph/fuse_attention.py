"""Replaces torch's attention by ours in the frozen graphs of quantized models, where ours is at least as fast.

Matches ``aten::_scaled_dot_product_flash_attention_for_cpu``, which every encoder with scaled-dot-product attention
has become by then, and writes ``int8::attention``. Left alone: dropout, causal attention, a log-sum-exp that something
reads, head counts that differ, and dtypes other than FP32 and BF16.

The mask is simplified on the way. Encoders build a padding mask as ``where(expand(mask & True), 0, -inf)``, a value for
each query and key in memory; our operator broadcasts and takes booleans, so it gets the (batch, 1, 1, keys) behind it.
"""

from __future__ import annotations

import operator
import os
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import optimization_hint

from int8 import isa
from int8.graph.lower_linear import note_attention
from int8.kernels import attention
from int8.kernels.attention import TORCH, AttentionProblem

aten = torch.ops.aten
prims = torch.ops.prims

_FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
_NAMESPACES = ("int8", "onednn")
#: Tokens that a symbolic size stands for where the compiler has no example of it.
_UNKNOWN_SIZE = 128


class FuseAttention(CustomGraphPass):
    """Runs on the frozen graph. Baselines stay plain torch: only graphs with quantized linears are touched."""

    def __call__(self, graph: Graph) -> None:
        if any(_is_quantized(node) for node in graph.nodes):
            note_attention(fuse_attention(graph))

    def uuid(self) -> Any:
        """What Inductor's cache on disk knows this pass by: its code, and all that its choices depend on.

        It runs behind the cache's lookup, so that a graph cached under another ISA or override would bring its kernels
        along; those of the passes before are named in the graph that is looked up.
        """
        code = get_hash_for_files((__file__, attention.__file__))
        return code, isa.effective(), os.environ.get(attention.OVERRIDE, "auto"), torch.get_num_threads()


def _is_quantized(node: Node) -> bool:
    if node.op != "call_function" or getattr(node.target, "namespace", None) not in _NAMESPACES:
        return False
    return any(word in str(node.target) for word in ("qlinear", "gemm", "linear"))


@dataclass(frozen=True)
class _Site:
    """One attention of the graph that may be replaced."""

    node: Node
    output: Node
    query: Node
    key: Node
    value: Node
    mask: Node | None
    scale: float

    def problem(self) -> AttentionProblem:
        batch, heads, queries, dim = (_size(size) for size in self.query.meta["val"].shape)
        mask = "none" if self.mask is None else "rows"
        keys = _size(self.key.meta["val"].shape[2])
        return AttentionProblem(batch, heads, queries, keys, dim, self.query.meta["val"].dtype, mask)


def fuse_attention(graph: Graph) -> int:
    """Rewrite ``graph`` in place; returns how many attentions became calls of our kernel."""
    sites = [site for site in map(_site, graph.find_nodes(op="call_function", target=_FLASH)) if site is not None]
    kernels = [attention.choose(site.problem(), isa.effective()).kernel for site in sites]
    own = [(site, kernel) for site, kernel in zip(sites, kernels, strict=True) if kernel != TORCH]
    for site, kernel in own:
        _replace(graph, site, kernel)
    if own:
        graph.eliminate_dead_code()
    return len(own)


def _site(node: Node) -> _Site | None:
    """What ``node`` computes; None where our operator does not compute the same."""
    arguments = _arguments(node)
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    users = list(node.users)
    if arguments["dropout_p"] or arguments["is_causal"] or not users:
        return None
    if any(user.target is not operator.getitem or (user.args[1] != 0 and user.users) for user in users):
        return None  # something reads the log-sum-exp
    outputs = [user for user in users if user.args[1] == 0]
    if len(outputs) != 1 or not _fits(query, key, value):
        return None
    given = arguments["scale"]
    scale = float(query.meta["val"].shape[3]) ** -0.5 if given is None else given
    if not isinstance(scale, float) or scale <= 0:
        return None
    return _Site(node, outputs[0], query, key, value, arguments["attn_mask"], scale)


def _arguments(node: Node) -> dict[str, Any]:
    names = ("query", "key", "value", "dropout_p", "is_causal")
    defaults = {"dropout_p": 0.0, "is_causal": False, "attn_mask": None, "scale": None}
    return {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def _fits(query: Node, key: Node, value: Node) -> bool:
    q, k, v = (node.meta["val"] for node in (query, key, value))
    same_dtype = q.dtype == k.dtype == v.dtype and q.dtype in (torch.float32, torch.bfloat16)
    # Heads and dims are never symbolic in an encoder, and comparing symbolic sizes would restrict them.
    fixed = all(isinstance(tensor.shape[i], int) for tensor in (q, k, v) for i in (1, 3))
    return same_dtype and fixed and q.shape[1] == k.shape[1] == v.shape[1] and q.shape[3] == k.shape[3] == v.shape[3]


def _size(size: Any) -> int:
    return int(optimization_hint(size, fallback=_UNKNOWN_SIZE))


def _replace(graph: Graph, site: _Site, kernel: str) -> None:
    mask = None if site.mask is None else simplest_mask(site.mask)
    arguments = (site.query, site.key, site.value, mask, site.scale, kernel)
    with graph.inserting_before(site.output):
        result = graph.call_function(torch.ops.int8.attention.default, arguments)
    result.meta.update(site.output.meta)
    site.output.replace_all_uses_with(result)
    for user in list(site.node.users):
        graph.erase_node(user)
    graph.erase_node(site.node)


# --- masks ----------------------------------------------------------------------------------------------------------


def simplest_mask(mask: Node) -> Node:
    """A node of ``mask``'s graph that masks the same when it is broadcast, and holds the fewest values."""
    simpler = _simpler(mask)
    while simpler is not None:
        mask, simpler = simpler, _simpler(simpler)
    return mask


def _simpler(mask: Node) -> Node | None:
    """One step: the operand that alone decides what ``mask`` says."""
    if mask.target is aten.expand.default:
        source = cast(Node, mask.args[0])
        return source if _ndim(source) == _ndim(mask) else None
    if mask.target is aten.where.self:
        condition, chosen, other = cast(tuple[Node, Node, Node], mask.args)
        attends, lowest = _filled_with(chosen), _filled_with(other)
        return condition if attends == 0 and lowest == float("-inf") and _ndim(condition) == _ndim(mask) else None
    if mask.target in (aten.bitwise_and.Tensor, aten.logical_and.default) and _is_bool(mask):
        left, right = cast(tuple[Node, Node], mask.args)
        for kept, other in ((left, right), (right, left)):
            if _always_true(other) and _ndim(kept) == _ndim(mask) and _is_bool(kept):
                return kept
    return None


def _ndim(node: Node) -> int:
    return int(node.meta["val"].ndim)


def _is_bool(node: Node) -> bool:
    return bool(node.meta["val"].dtype == torch.bool)


def _filled_with(node: Any) -> float | None:
    """The one value of a constant tensor or number; None where that is not known."""
    if isinstance(node, (int, float)):
        return float(node)
    if isinstance(node, Node) and node.target in (aten.full.default, aten.scalar_tensor.default):
        value = node.args[1] if node.target is aten.full.default else node.args[0]
        return float(value) if isinstance(value, (int, float)) else None
    return None


def _always_true(node: Node) -> bool:
    """True if every element of ``node`` is true whatever the graph's inputs are."""
    if node.target is aten.full.default:
        return node.args[1] is True
    if node.target in (aten.unsqueeze.default, aten.expand.default):
        return _always_true(cast(Node, node.args[0]))
    if node.target is aten.bitwise_and.Tensor:
        return all(_always_true(cast(Node, operand)) for operand in node.args)
    if node.target is aten.ge.Scalar:
        least = _least(cast(Node, node.args[0]))
        return least is not None and least >= cast(float, node.args[1])
    return False


def _least(node: Node) -> int | None:
    """A bound below all elements of position indices; None where there is none."""
    if node.target is prims.iota.default:
        start, step = node.kwargs.get("start"), node.kwargs.get("step")
        return start if isinstance(start, int) and isinstance(step, int) and step >= 0 else None
    if node.target in (aten.unsqueeze.default, aten.expand.default):
        return _least(cast(Node, node.args[0]))
    if node.target is aten.add.Tensor and isinstance(node.args[1], int):
        least = _least(cast(Node, node.args[0]))
        return None if least is None else least + node.args[1]
    return None
