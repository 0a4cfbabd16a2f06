"""Finds what a graph does with a linear's result that a kernel can do instead, before the result is written.

An activation function is recognized by its values, not by how it is written: the elementwise nodes behind a linear are
evaluated on samples and compared with the functions that kernels have. So torch's own decompositions, those of other
torch versions and hand-written variants all match, and nothing that computes something else does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node

aten = torch.ops.aten
prims = torch.ops.prims

_CONVERT = prims.convert_element_type.default
_CLONE = aten.clone.default

#: Operators of which an activation function may consist.
_ELEMENTWISE = frozenset(
    {
        aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default, aten.reciprocal.default,
        aten.erf.default, aten.tanh.default, aten.exp.default, aten.sigmoid.default, aten.relu.default,
        aten.pow.Tensor_Scalar, aten.clamp_min.default, aten.clamp_max.default, aten.maximum.default,
        aten.gelu.default, aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar, _CONVERT,
    }
)  # fmt: skip

#: Longest decomposition that is looked at, in nodes.
_LONGEST = 16
#: How far two ways to compute one function may lie apart in FP32.
_TOLERANCE = 2e-6

_FUNCTIONS = {
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu": torch.relu,
}


@dataclass(frozen=True)
class Epilogue:
    """What follows a linear and its kernel can do.

    Attributes:
        post: ``none``, ``gelu``, ``gelu_tanh`` or ``relu``.
        residual: a tensor of the result's shape that is added behind it.
        last: the node that all of this ends in, which a fused kernel replaces; the linear itself where nothing follows.
    """

    post: str
    residual: Node | None
    last: Node

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of what ``last`` gives."""
        found: torch.dtype = self.last.meta["val"].dtype
        return found


def find(linear: Node) -> Epilogue:
    """The longest epilogue behind ``linear`` that a kernel can take over."""
    post, last = _activation(_behind_copies(linear)) or ("none", linear)
    residual, total = _residual(last)
    return Epilogue(post, residual, total)


def only_user(node: Node) -> Node | None:
    """The node that alone reads ``node``; None if there are more or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def behind_conversions(node: Node) -> Node:
    """The end of the copies and conversions of dtype behind ``node`` that alone read each other."""
    user = only_user(node)
    while user is not None and user.target in (_CLONE, _CONVERT):
        node, user = user, only_user(user)
    return node


def _behind_copies(node: Node) -> Node:
    """Dropout that does nothing leaves a copy in the graph."""
    user = only_user(node)
    while user is not None and user.target is _CLONE:
        node, user = user, only_user(user)
    return node


def _residual(node: Node) -> tuple[Node | None, Node]:
    """(what is added to ``node``, the sum), or (None, ``node``)."""
    source = _behind_copies(node)
    total = only_user(source)
    if total is None or total.target is not aten.add.Tensor or total.kwargs:
        return None, node
    other = next((part for part in total.args if part is not source), None)
    if not isinstance(other, Node):
        return None, node
    value, result = other.meta["val"], total.meta["val"]
    fits = value.shape == result.shape == node.meta["val"].shape
    if (
        not fits
        or value.dtype not in (torch.float32, torch.bfloat16)
        or result.dtype not in (value.dtype, torch.float32)
    ):
        return None, node
    return other, total


def _activation(start: Node) -> tuple[str, Node] | None:
    """(name, last node) of the activation function that is applied to ``start``, or None."""
    region = _region(start)
    for count, last in enumerate(region[1:], start=2):
        inside = set(region[:count])
        escapes = any(user not in inside for node in region[: count - 1] for user in node.users)
        name = None if escapes else _named(region[:count])
        if name is not None:
            return name, _with_conversion(last)
    return None


def _region(start: Node) -> list[Node]:
    """``start`` and the elementwise nodes that are computed from it alone, in the graph's order."""
    region, inside, node = [start], {start}, start.next
    while node.op != "root" and len(region) < _LONGEST:
        inputs = node.all_input_nodes
        if inputs and node.target in _ELEMENTWISE and all(one in inside for one in inputs):
            region.append(node)
            inside.add(node)
        node = node.next
    return region


def _with_conversion(node: Node) -> Node:
    user = only_user(node)
    return user if user is not None and user.target is _CONVERT else node


def _named(region: list[Node]) -> str | None:
    """The function that ``region`` computes of its first node, by its values on samples."""
    with unset_fake_temporarily(), torch.autocast("cpu", enabled=False):
        return _matching(region)


def _matching(region: list[Node]) -> str | None:
    x = torch.linspace(-9.0, 9.0, 2001)
    values: dict[Node, torch.Tensor] = {region[0]: x}
    for node in region[1:]:
        # Rounding to BF16 and back between the steps is no part of the function.
        args = [values[arg] if isinstance(arg, Node) else arg for arg in node.args]
        values[node] = values[node.all_input_nodes[0]] if node.target is _CONVERT else _evaluated(node, args)
    result = values[region[-1]]
    for name, function in _FUNCTIONS.items():
        expected: torch.Tensor = function(x)  # type: ignore[operator]
        if torch.allclose(result, expected, rtol=0.0, atol=_TOLERANCE):
            return name
    return None


def _evaluated(node: Node, args: list[Any]) -> torch.Tensor:
    result: torch.Tensor = node.target(*args, **node.kwargs)  # type: ignore[operator]
    return result
