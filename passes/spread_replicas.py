"""Type every node on dp, and let each micro-batch add its share of what all of them have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from autopar.ir.graph import Block, Program, info, set_info, set_strategy
from autopar.placement import Placement, Strategy
from autopar.plan.plan import Plan
from autopar.rules.data_axis import becomes_share
from autopar.rules.spread import AXIS, data_types
from autopar.rules.verify import Level

from .insert_conversions import map_operands


@dataclass(frozen=True)
class SpreadReplicas:
    """Strategies on dp; a value that is the same in m micro-batches and added to the loss (a weight penalty) is ÷ m.

    Requires: a plan that the program's coupling allows. Ensures: every node is typed on dp, and the loss of a
    micro-batch is its summand.

        loss = add(share, penalty)   |   part = div(penalty, 3)
                                     |   loss = add(share, part)
    """

    name: ClassVar[str] = "spread_replicas"
    leaves: ClassVar[Level] = Level.CONVERTED

    def apply(self, program: Program, plan: Plan | None) -> Program:
        assert plan is not None
        if plan.mesh.dp == 1 and plan.accumulation == 1:
            return program
        program = program.copy_blocks()
        types = data_types(program)
        if types.coupling is not None:
            types.coupling.check(plan)
        for name, results in types.results.items():
            block = program.blocks[name]
            for node in block.nodes:
                set_strategy(node, types.strategies[node], AXIS.name)
            if plan.accumulation > 1:
                _share_out(block, types.strategies, results, plan.accumulation)
        return program


def _share_out(
    block: Block, strategies: Mapping[fx.Node, Strategy], results: tuple[Placement, ...], micro_batches: int
) -> None:
    """Divide each whole value that is read as a summand, once for all of its readers."""
    shares: dict[fx.Node, fx.Node] = {}

    def read_as(value: fx.Node, wanted: Placement, reader: fx.Node) -> fx.Node:
        if not becomes_share(strategies[value].output, wanted):
            return value
        if value not in shares:
            with block.graph.inserting_before(reader):
                share = block.graph.call_function(torch.ops.aten.div.Tensor, (value, micro_batches))
            shares[value] = set_info(share, info(value).made())
        return shares[value]

    for node in block.ops:
        if node in strategies:
            map_operands(node, strategies[node].inputs, read_as)
    leaving = zip(block.results, results, strict=True)
    block.output.args = (tuple(read_as(value, wanted, block.output) for value, wanted in leaving),)
