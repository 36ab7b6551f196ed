"""Which rows of a dim a rank has, where the batch is not the outermost part of it.

`cat([x, y])` of two shards of a batch is [x₀; y₀] on rank 0 and [x₁; y₁] on rank 1: not a slice of the whole, but the
same samples, in two runs of rows (`Placement.runs`). Sums over the dim, and ops on each row, do not mind, provided that
all operands have the same runs. A reshape that merges an outer dim into the batch's makes runs; one that splits them
off again, or a slice of whole runs, ends them.
"""

from __future__ import annotations

from dataclasses import replace

import sympy
import torch
from torch import fx

from ..ir.graph import B, info, node_inputs
from ..placement import Placement, Shard, Strategy
from .arguments import option

aten = torch.ops.aten

_END = 2**63 - 1  # of a slice, where none is named


def moved_rows(node: fx.Node, given: tuple[Placement, ...]) -> Strategy | None:
    """The strategy of a view or concatenation that makes or ends runs of a batch; None of another op."""
    if node.target is aten.cat.default:
        return _of_cat(node, given)
    if node.target is aten.slice.Tensor:
        return _of_slice(node, given[0])
    return _of_reshape(node, given[0]) if node.target is aten.reshape.default else None


def _of_cat(node: fx.Node, given: tuple[Placement, ...]) -> Strategy | None:
    """cat along the sharded dim of operands of one shape."""
    operands = node_inputs(node)
    dim = int(node.args[1]) % len(info(node).shape) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    shapes = {info(n).shape for n in operands}
    if len(set(given)) != 1 or not given[0].is_shard or given[0].dim != dim or len(shapes) != 1:
        return None
    return Strategy(given, replace(given[0], runs=given[0].runs * len(operands)))


def _of_slice(node: fx.Node, given: Placement) -> Strategy | None:
    """Some of the runs of a dim: x[:b] of [2·b] rows in two runs."""
    shape = info(node_inputs(node)[0]).shape
    dim, start, step = (option(node, name, 0) for name in ("dim", "start", "step"))
    if not given.is_shard or given.runs == 1 or dim % len(shape) != given.dim or step != 1:
        return None
    size = shape[given.dim]
    end = option(node, "end", _END)
    stop = size if end == _END else end
    first, count = (sympy.cancel(rows * given.runs / size) for rows in (start, stop - start))
    whole = first.is_Integer and count.is_Integer and first >= 0 < count
    return Strategy((given,), replace(given, runs=count)) if whole and first + count <= given.runs else None


def _of_reshape(node: fx.Node, given: Placement) -> Strategy | None:
    """In the order of its elements a tensor is [outer, b, inner]; a reshape moves dims, but not that border."""
    source, target = info(node_inputs(node)[0]).shape, info(node).shape
    dims = [i for i, size in enumerate(target) if B in size.free_symbols]
    if not given.is_shard or len(dims) != 1:
        return None
    (into,) = dims
    outer = sympy.Mul(*source[: given.dim]) * given.runs
    runs = sympy.cancel(outer / sympy.Mul(*target[:into]))
    inner = sympy.cancel(target[into] / (runs * B))
    if sympy.denom(runs) != 1 or sympy.denom(inner) != 1 or B in inner.free_symbols:
        return None
    return Strategy((given,), replace(Shard(into), runs=runs))
