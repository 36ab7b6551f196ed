"""Reading and writing at computed places."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..ir.graph import arguments, info, node_inputs
from .arguments import option
from .factor import Dims, Rule, RuleMaker, aligned, einsum

aten = torch.ops.aten

_FIRST = (frozenset({0}),)

_rows = einsum("w[v d] i[*b] -> y[*b d]", saves="i")


def _embedding(node: fx.Node) -> Rule:
    """Sharding v: rows outside the shard count as zero, so the result is Partial.

    Gradients scaled by how often a row occurs in the batch (scale_grad_by_freq) need the whole batch.
    """
    rule = replace(_rows(node), only_on={"v": "tp"})
    return replace(rule, whole=frozenset(rule.factors)) if len(node.args) > 3 and node.args[3] else rule


def _gather(node: fx.Node) -> Rule:
    """`x[*d] i[*d] -> y[*d]`: dim `dim` stays whole, and so do dims of which the index has fewer."""
    x, index = (info(n).shape for n in node_inputs(node)[:2])
    dims: Dims = tuple(f"d{i}" for i in range(len(x)))
    whole = frozenset(f"d{i}" for i, (n, m) in enumerate(zip(x, index, strict=True)) if n != m)
    along = frozenset({f"d{int(option(node, 'dim')) % len(x)}"}) if x else frozenset()
    return Rule((dims, dims), dims, whole | along, linear=_FIRST, saves=(1,))


def _scatter(node: fx.Node) -> Rule:
    """`x[*d] i[*d] u[*d] -> y[*d]`: as gather; linear in what is there and what is written, together."""
    operands = node_inputs(node)
    shapes = [info(n).shape for n in operands]
    dims: Dims = tuple(f"d{i}" for i in range(len(shapes[0])))
    whole = frozenset(f"d{i}" for i, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1)
    along = frozenset({f"d{int(option(node, 'dim')) % len(dims)}"})
    linear = (frozenset({0, 2}),) if len(operands) == 3 else ()
    return Rule(tuple(dims for _ in operands), dims, whole | along, linear=linear, saves=(1,))


def _index_select(node: fx.Node) -> Rule:
    """`x[*d v *e] i[n] -> y[*d n *e]`: v stays whole."""
    rank = len(info(node).shape)
    dim = int(option(node, "dim")) % rank
    dims = [f"d{i}" for i in range(rank)]
    source, result = list(dims), list(dims)
    source[dim], result[dim] = "v", "n"
    return Rule((tuple(source), ("n",)), tuple(result), frozenset({"v"}), linear=_FIRST, saves=(1,))


def _index(node: fx.Node) -> Rule:
    """x[i, :, j]: dims without an index pass, those with one stay whole; the indices' dims, broadcast, are new."""
    source, indices = arguments(node)[:2]
    read = {d: info(index) for d, index in enumerate(indices) if index is not None}
    if any(index.dtype == torch.bool for index in read.values()):
        return _whole(node)  # as many rows as there are trues
    shapes, indexed = [index.shape for index in read.values()], list(read)
    together = indexed == list(range(indexed[0], indexed[-1] + 1))
    first = indexed[0] if together else 0  # where the indices' dims are in the result
    spread = info(node).shape[first : first + max(map(len, shapes))]
    dims: Dims = tuple(None if d in read else f"p{d}" for d in range(len(info(source).shape)))
    passing = [f for f in dims if f is not None]
    return Rule(
        (dims, *(aligned(shape, spread) for shape in shapes)),
        (*passing[:first], *aligned(spread, spread), *passing[first:]),
        linear=_FIRST,
        saves=tuple(range(1, len(read) + 1)),
    )


def _whole(node: fx.Node) -> Rule:
    inputs: tuple[Dims, ...] = tuple((None,) * len(info(n).shape) for n in node_inputs(node))
    return Rule(inputs, (None,) * len(info(node).shape))


def _one_hot(node: fx.Node) -> Rule:
    """`i[*b] -> y[*b v]`."""
    dims: Dims = tuple(f"d{i}" for i in range(len(info(node).shape)))
    return Rule((dims[:-1],), dims, whole=frozenset({str(dims[-1])}))


def _diff(node: fx.Node) -> Rule:
    """Differences along `dim`, with what is put before or after; linear in all together."""
    rank = len(info(node).shape)
    dims: Dims = tuple(f"d{i}" for i in range(rank))
    operands: Any = node_inputs(node)
    together = (frozenset(range(len(operands))),)
    return Rule(
        tuple(dims for _ in operands), dims, frozenset({f"d{int(option(node, 'dim')) % rank}"}), linear=together
    )


RULES: dict[object, RuleMaker] = {
    aten.embedding.default: _embedding,
    aten.gather.default: _gather,
    aten.scatter.src: _scatter,
    aten.scatter.value: _scatter,
    aten.scatter_add.default: _scatter,
    aten.index_select.default: _index_select,
    aten.index.Tensor: _index,
    aten.one_hot.default: _one_hot,
    aten.diff.default: _diff,
}
