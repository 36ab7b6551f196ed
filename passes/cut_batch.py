"""From a program typed on an axis to the sizes that one of its ranks has: `cut_sizes`; on dp, the pass `CutBatch`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from autopar.errors import PlanError
from autopar.ir.graph import B, Program, Shape, info, set_info
from autopar.plan.plan import Plan
from autopar.rules.spread import AXIS, has_whole_batch, reads_batch_size
from autopar.rules.verify import Level
from autopar.rules.where import where

from .insert_conversions import SIZED, localise

aten = torch.ops.aten


@dataclass(frozen=True)
class CutBatch:
    """Sizes of a program in which some value has the samples of all replicas: `b` becomes a replica's.

    Requires: conversions over dp. Ensures: a size of the whole batch is dp · b, one of a shard is b.

        all = all_gather(y, 0, axis="dp")   |   all: [2·b, d]
        ids = arange(b)                     |   ids = arange(2·b)
    """

    name: ClassVar[str] = "cut_batch"
    leaves: ClassVar[Level] = Level.SPREAD

    def apply(self, program: Program, plan: Plan | None) -> Program:
        assert plan is not None
        ranks = plan.mesh.dp
        if ranks == 1 or not has_whole_batch(program):
            return program
        program = program.copy_blocks()
        for block in program.blocks.values():
            for node in block.nodes if program.count(block.name) else ():
                _cut(node, ranks)
        return program


def _cut(node: fx.Node, ranks: int) -> None:
    placement = info(node).placement_on(AXIS.name)
    sharded = placement is not None and placement.is_shard
    arguments = node.args, node.kwargs
    if node.target in SIZED:
        localise(node, AXIS.name, ranks)
    elif sharded and node.target is not aten.slice.Tensor and _names_batch(node) and not reads_batch_size(node):
        raise PlanError(
            f"dp={ranks}: {node.target} at {where(node)} makes samples of a batch of which others are gathered over "
            "the replicas: use dp=1"
        )
    cut_sizes(node, B, AXIS.name, ranks)
    if sharded and node.target is aten.slice.Tensor:  # whole runs of rows: in each of them b is a replica's
        node.args, node.kwargs = arguments


def cut_sizes(node: fx.Node, size: sympy.Symbol, axis: str, ranks: int) -> None:
    """Write shape and arguments of a node, in which `size` is that of all ranks, in that of one."""
    node.args, node.kwargs = _scaled_argument(node.args, size, ranks), _scaled_argument(node.kwargs, size, ranks)
    facts, placement = info(node), info(node).placement_on(axis)
    shape = list(scaled(facts.shape, size, ranks))
    if placement is not None and placement.is_shard:
        shape[placement.dim] /= ranks
    set_info(node, replace(facts, shape=tuple(shape)))


def scaled(shape: Shape, size: sympy.Symbol, ranks: int) -> Shape:
    """A shape in which `size` is that of all ranks, in that of one."""
    return tuple(n.subs(size, ranks * size) for n in shape)


def _scaled_argument(argument: Any, size: sympy.Symbol, ranks: int) -> Any:
    if isinstance(argument, tuple | list):
        return type(argument)(_scaled_argument(a, size, ranks) for a in argument)
    if isinstance(argument, dict):
        return {key: _scaled_argument(value, size, ranks) for key, value in argument.items()}
    return argument.subs(size, ranks * size) if isinstance(argument, sympy.Expr) else argument


def _names_batch(node: fx.Node) -> bool:
    arguments = node.args, node.kwargs
    return bool(_scaled_argument(arguments, B, 2) != arguments)
