"""Elementwise ops with broadcasting, reductions and factories, by category."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..ir.graph import info, node_inputs
from .factor import Dims, Rule, RuleMaker, aligned

aten = torch.ops.aten


def elementwise(linear: str = "", saves: str = "") -> RuleMaker:
    """Dims are aligned from the right; a dim of size 1 against a larger one is whole.

    linear: "each" (in one operand at a time), "all" (in all together), "first", or "" (not linear).
    saves: "x" (the operands), "y" (the result) or "" (nothing).
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
    if how == "first":
        return (frozenset({0}),) if node.args and isinstance(node.args[0], fx.Node) else ()
    return ()


def _reduce(linear: bool) -> RuleMaker:
    def make(node: fx.Node) -> Rule:
        shape = info(node_inputs(node)[0]).shape
        dims, keep = _reduced(node, len(shape))
        inputs: Dims = tuple(f"d{i}" for i in range(len(shape)))
        output = [None if i in dims else f for i, f in enumerate(inputs) if keep or i not in dims]
        # A sum of shards is a summand of the sum; a mean, maximum or variance of shards is not.
        whole = frozenset() if node.target in _SUMS else frozenset(f"d{i}" for i in dims)
        passes = (frozenset({0}),) if linear else ()
        return Rule((inputs,), tuple(output), whole, linear=passes)

    return make


def _reduced(node: fx.Node, rank: int) -> tuple[set[int], bool]:
    raw: Any = node.args[1] if len(node.args) > 1 else None
    dims = range(rank) if raw is None or raw == [] else [raw] if isinstance(raw, int) else raw
    keep = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    return {int(d) % rank for d in dims}, keep


def _factory(node: fx.Node) -> Rule:
    """Constants are made whole or in any shard; the result's own size is made local."""
    rank = len(info(node).shape)
    inputs: tuple[Dims, ...] = tuple((None,) * len(info(o).shape) for o in node_inputs(node))
    dims = [f"d{i}" for i in range(rank)]
    return Rule(inputs, tuple(dims), even=frozenset(dims), kind="view")


def _counting(node: fx.Node) -> Rule:
    """arange: its values depend on the position, so it is whole."""
    return Rule((), ("d0",), whole=frozenset({"d0"}), kind="view")


_SUMS = {aten.sum.default, aten.sum.dim_IntList}

_each, _all, _first = elementwise("each", "x"), elementwise("all"), elementwise("first")
_keeps_input, _keeps_result, _plain = elementwise(saves="x"), elementwise(saves="y"), elementwise()

RULES: dict[object, RuleMaker] = {
    aten.add.Tensor: _all,
    aten.sub.Tensor: _all,
    aten.mul.Tensor: _each,
    aten.div.Tensor: elementwise("first", "x"),
    aten.neg.default: _first,
    aten.alias.default: _first,
    aten.clone.default: _first,
    aten.to.dtype: _first,
    **dict.fromkeys(
        (aten.silu.default, aten.gelu.default, aten.relu.default, aten.pow.Tensor_Scalar, aten.cos.default,
         aten.sin.default, aten.log.default, aten.abs.default, aten.clamp.default, aten.softplus.default),
        _keeps_input,
    ),
    **dict.fromkeys(
        (aten.exp.default, aten.tanh.default, aten.sigmoid.default, aten.rsqrt.default, aten.sqrt.default,
         aten.reciprocal.default),
        _keeps_result,
    ),
    **dict.fromkeys(
        (aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar,
         aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor,
         aten.logical_not.default, aten.logical_and.default, aten.logical_or.default, aten.bitwise_not.default,
         aten.__and__.Tensor, aten.__or__.Tensor, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor,
         aten.where.self, aten.where.ScalarOther, aten.masked_fill.Scalar, aten.minimum.default,
         aten.maximum.default, aten.detach.default, aten.rsub.Scalar, aten.add.Scalar, aten.sub.Scalar,
         aten.mul.Scalar, aten.div.Scalar, aten.dropout.default),
        _plain,
    ),
    aten.sum.default: _reduce(linear=True),
    aten.sum.dim_IntList: _reduce(linear=True),
    aten.mean.default: _reduce(linear=True),
    aten.mean.dim: _reduce(linear=True),
    aten.amax.default: _reduce(linear=False),
    **dict.fromkeys(
        (aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format,
         aten.new_ones.default, aten.new_zeros.default, aten.new_full.default),
        _factory,
    ),
    aten.arange.default: _counting,
    aten.arange.start: _counting,
}  # fmt: skip
