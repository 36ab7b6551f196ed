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
from .rows import moved_rows


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
