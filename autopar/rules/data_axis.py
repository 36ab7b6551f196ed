"""The data axis: parts of a batch, on replicas (dp) and in micro-batches.

Parameters enter as Replicate, grad Partial, the batch as a shard of its dim, and the loss leaves as a summand of each
part. So what samples have to do with each other shows as a conversion.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import sympy
import torch
from torch import fx

from ..ir.graph import B, NodeInfo, Role, info, node_inputs
from ..ir.ops import convert, is_collective
from ..placement import GRAD_PARTIAL, PARTIAL, REPLICATE, Placement, Shard, Strategy
from .arguments import option
from .axes import Axis, symbols_of
from .random import draws

aten = torch.ops.aten

_END = 2**63 - 1  # of a slice, where none is named


@dataclass(frozen=True)
class DataAxis(Axis):
    """dp: it shards the batch alone, and any number of equal parts is typed alike."""

    size: int = 2
    name: ClassVar[str] = "dp"

    def offers(self, sizes: Iterable[sympy.Expr], uneven: bool = True) -> bool:
        return B in symbols_of(sizes)

    def even(self, size: sympy.Expr) -> bool:
        return B in size.free_symbols

    def given(self, facts: NodeInfo) -> Placement:
        has_batch = facts.role is Role.INPUT and bool(facts.shape) and facts.shape[0] == B
        return Shard(0) if has_batch else REPLICATE

    def adapted(self, node: fx.Node, options: list[Strategy], reading: tuple[Placement, ...]) -> list[Strategy]:
        """Shards are read in the runs in which they lie; what draws random numbers draws those of its own samples."""
        if node.target is convert or is_collective(node.target):  # over another axis: linear, alike on each part
            return [Strategy(reading, reading[0])]
        if is_batch_statistic(node):
            return [_synchronised(node)]
        if (moved := moved_rows(node, reading)) is not None:
            return [moved]
        runs = {placement.runs for placement in reading if placement.is_shard}
        if len(runs) > 1:
            return []
        options = [_in_runs(strategy, *runs) for strategy in options] if runs else options
        return [s for s in options if s.output.is_shard] if draws(node.target) else options


def becomes_share(source: Placement, wanted: Placement) -> bool:
    """Whether a conversion is of a value that is the same on all parts of a batch, to a summand."""
    return source in (REPLICATE, GRAD_PARTIAL) and wanted == PARTIAL


def has_batch(node: fx.Node) -> bool:
    """Whether the batch is among the dims of a value."""
    return B in symbols_of(info(node).shape)


def is_batch_statistic(node: fx.Node) -> bool:
    """Whether a batch norm takes mean and variance from its samples: the emitted one does so over all replicas."""
    return node.target is torch.ops.aten.batch_norm.default and bool(option(node, "training"))


def _synchronised(node: fx.Node) -> Strategy:
    x, *others = node_inputs(node)
    shared = (GRAD_PARTIAL if info(n).requires_grad else REPLICATE for n in others)
    return Strategy((Shard(0), *shared), Shard(0))


def _in_runs(strategy: Strategy, runs: sympy.Expr) -> Strategy:
    placements = (replace(p, runs=runs) if p.is_shard else p for p in (*strategy.inputs, strategy.output))
    *inputs, output = placements
    return Strategy(tuple(inputs), output)


# --------------------------------------------------------------------------------
# Runs: which rows of a dim a rank has, where the batch is not the outermost part of it


def moved_rows(node: fx.Node, given: tuple[Placement, ...]) -> Strategy | None:
    """The strategy of a view or concatenation that makes or ends runs of a batch; None of another op.

    `cat([x, y])` of two shards of a batch is [x₀; y₀] on rank 0 and [x₁; y₁] on rank 1: not a slice of the whole, but
    the same samples, in two runs of rows (`Placement.runs`). Sums over the dim, and ops on each row, do not mind,
    provided that all operands have the same runs. A reshape that merges an outer dim into the batch's makes runs; one
    that splits them off again, or a slice of whole runs, ends them.
    """
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
