"""Write indexing by positions as views and gathers, which need no positions of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from autopar.ir.build import call, eliminate_dead, replace_node
from autopar.ir.graph import MODEL, Program, Shape, arguments, info
from autopar.plan.plan import Plan
from autopar.rules.verify import Level

aten = torch.ops.aten


@dataclass(frozen=True)
class ReadPositions:
    """x[arange(b)[:, None], i] reads row by row: nothing of it couples samples, though arange(b) would.

    Requires: a clean program. Ensures: no index of the batch dim is a list of its positions.

        index(x, [arange(b).reshape(b, 1, 1), arange(s).reshape(1, 1, s)])   |   reshape(x, [b, 1, s])
        index(x, [arange(b), i])                                             |   gather(x, 1, i.reshape(b, 1))…
    """

    name: ClassVar[str] = "read_positions"
    leaves: ClassVar[Level] = Level.TRACED

    def apply(self, program: Program, plan: Plan | None) -> Program:
        program = program.copy_blocks()
        graph = program.blocks[MODEL].graph
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target is aten.index.Tensor:
                _rewrite(node)
        eliminate_dead(graph)
        return program


def _rewrite(node: fx.Node) -> None:
    source, indices = arguments(node)[:2]
    if any(i is None or info(i).dtype == torch.bool for i in indices):
        return
    shape, count = info(node).shape, max(len(info(i).shape) for i in indices)
    sizes = info(source).shape
    axes = [_axis(i, n, count) for i, n in zip(indices, sizes, strict=False)]
    if None not in axes and _as_view(axes, sizes[: len(axes)], shape[:count]):
        with node.graph.inserting_before(node):
            new = call(node.graph, aten.reshape.default, (source, list(shape)), info(node))
        replace_node(node, new)
    elif len(axes) == 2 and axes[0] == 0 and shape[0] == sizes[0]:
        replace_node(node, _gather(node, source, indices[1], count))


def _axis(index: fx.Node, size: sympy.Expr, count: int) -> int | None:
    """The axis of the broadcast indices along which `index` counts 0 … size − 1, if it is such a count."""
    shape = info(index).shape
    long = [axis for axis, n in enumerate(shape) if n != 1]
    if len(long) > 1 or not _counts(index, size):
        return None
    return count - len(shape) + (long[0] if long else 0)


def _counts(node: fx.Node, size: sympy.Expr) -> bool:
    """Whether a value is arange(size), but for dims of size 1."""
    while node.target in (aten.unsqueeze.default, aten.reshape.default) or (
        node.target is aten.to.dtype and not info(node).dtype.is_floating_point
    ):
        node = arguments(node)[0]
    values = arguments(node)
    if node.target is aten.arange.default:
        return bool(values[0] == size)
    return node.target is aten.arange.start and values[0] == 0 and bool(values[1] == size)


def _as_view(axes: list[Any], sizes: Shape, result: Shape) -> bool:
    """Whether the indexed dims come in order, and every other axis is of size 1: then no element moves."""
    kept = [n for n in result if n != 1]
    return axes == sorted(set(axes)) and kept == [n for n in sizes if n != 1]


def _gather(node: fx.Node, source: fx.Node, index: fx.Node, count: int) -> fx.Node:
    """x[arange(b), i] for x of [b, v, …] → gather(x, 1, i), with i spread over the other dims of x."""
    graph, facts = node.graph, info(node)
    rows, rest = facts.shape[:count], facts.shape[count:]
    places = sympy.Mul(*rows[1:])
    with graph.inserting_before(node):
        # Indices from the end are legal in x[…], not in gather.
        index = call(graph, aten.remainder.Scalar, (index, info(source).shape[1]), info(index))
        for shape, op in (
            (rows, aten.expand.default),
            ((rows[0], places, *(sympy.Integer(1) for _ in rest)), aten.reshape.default),
            ((rows[0], places, *rest), aten.expand.default),
        ):
            if info(index).shape != tuple(shape):
                index = call(graph, op, (index, list(shape)), info(index), tuple(shape))
        read = call(graph, aten.gather.default, (source, 1, index), facts, info(index).shape)
        return call(graph, aten.reshape.default, (read, list(facts.shape)), facts)
