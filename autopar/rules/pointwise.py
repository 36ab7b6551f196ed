"""Elementwise ops with broadcasting: every op that torch tags so, and some that it does not."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..ir.graph import info, node_inputs
from .arguments import is_tagged
from .factor import Rule, RuleMaker, aligned

aten = torch.ops.aten


def elementwise(linear: str = "", saves: str = "") -> RuleMaker:
    """Dims are aligned from the right; a dim of size 1 against a larger one is whole.

    linear: "each" (in one operand at a time), "all" (in all together), "first", "rest" (in all but the first
    together), or "" (not linear). saves: "x" (the operands), "y" (the result) or "" (nothing).
    """

    def make(node: fx.Node) -> Rule:
        operands = node_inputs(node)
        result = info(node).shape
        inputs = tuple(aligned(info(o).shape, result) for o in operands)
        kept = {"x": tuple(range(len(operands))), "y": (-1,), "": ()}[saves]
        return Rule(
            inputs,
            aligned(result, result),
            linear=_linear(linear, node, len(operands)),
            kind="memory",
            saves=kept,
        )

    return make


def _linear(how: str, node: fx.Node, operands: int) -> tuple[frozenset[int], ...]:
    if how == "each":
        return tuple(frozenset({i}) for i in range(operands))
    if how == "all":
        # x + 3 adds 3 on every rank: only a sum of tensors is linear.
        return (frozenset(range(operands)),) if operands == 2 else ()
    if how == "rest":
        return (frozenset(range(1, operands)),)
    if how == "first":
        return (frozenset({0}),) if node.args and isinstance(node.args[0], fx.Node) else ()
    return ()


def _fill(node: fx.Node) -> Rule:
    """masked_fill passes a Partial where it fills in zeros."""
    return elementwise("first" if node.args[2] == 0 else "")(node)


def _scaled(node: fx.Node) -> Rule:
    """A factor for each channel, in dim 1 (prelu): `x[b c *] w[c] -> y[b c *]`."""
    x, w = (info(n).shape for n in node_inputs(node))
    dims = tuple(f"d{i}" for i in range(len(x)))
    factor = (None,) if len(w) == 1 and w[0] == 1 else dims[1:2]
    return Rule((dims, factor if w else ()), dims, saves=(0, 1))


_each, _all, _first = elementwise("each", "x"), elementwise("all"), elementwise("first")
_keeps_input, _keeps_result, _plain = elementwise(saves="x"), elementwise(saves="y"), elementwise()

# What passes a Partial, or keeps less than its operands for backward.
RULES: dict[object, RuleMaker] = {
    aten.add.Tensor: _all,
    aten.sub.Tensor: _all,
    aten.mul.Tensor: _each,
    aten.div.Tensor: elementwise("first", "x"),
    aten.where.self: elementwise("rest"),
    aten.masked_fill.Scalar: _fill,
    aten.prelu.default: _scaled,
    **dict.fromkeys(
        (aten.neg.default, aten.alias.default, aten.clone.default, aten.to.dtype, aten.mul.Scalar, aten.div.Scalar),
        _first,
    ),
    **dict.fromkeys(
        (aten.exp.default, aten.tanh.default, aten.sigmoid.default, aten.rsqrt.default, aten.sqrt.default,
         aten.reciprocal.default, aten.relu.default),
        _keeps_result,
    ),
    **dict.fromkeys((aten.hardswish.default, aten.log_sigmoid.default), _keeps_input),
    **dict.fromkeys(
        (aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar, aten.rsub.Tensor, aten.where.ScalarOther,
         aten.where.ScalarSelf, aten.where.Scalar, aten.masked_fill.Tensor, aten.dropout.default, aten.detach.default,
         aten.floor_divide.default, aten.floor_divide.Scalar, aten.__and__.Tensor, aten.__or__.Tensor,
         aten.__and__.Scalar, aten.__or__.Scalar, aten.isin.Tensor_Scalar),
        _plain,
    ),
}  # fmt: skip


def is_pointwise(target: Any) -> bool:
    """Whether torch tags an op as elementwise."""
    return is_tagged(target, torch.Tag.pointwise)


def pointwise(node: fx.Node) -> Rule:
    """The rule of a tagged op: not linear, keeps its operands."""
    return _keeps_input(node)
