"""Insert `convert` over dp where a reduced value is used as one of the whole batch, or all have what is to be added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from autopar.ir.graph import Block, Program, Role, info, set_info
from autopar.ir.ops import convert
from autopar.placement import Placement, Strategy
from autopar.plan.plan import Plan
from autopar.rules.data_axis import AXIS, becomes_share, data_types
from autopar.rules.verify import Level

from .insert_conversions import map_operands


@dataclass(frozen=True)
class InsertDataConversions:
    """One `convert` over dp for each (value, wanted placement); such values have no batch left among their dims.

    Requires: a plan that the program's coupling allows. Ensures: the loss of a replica is its summand of the whole
    loss; every op reads operands as its strategy on dp wants them; what each of m micro-batches has and adds to the
    loss (a weight penalty) it adds 1/m of. Placements over tp stay as they are.

        aux = mul(share, mean)           |   share_r = convert(share, "P", "R", "dp")
                                         |   aux = mul(share_r, mean)
        loss = add(share, penalty)       |   part = div(penalty, 3)
                                         |   once = convert(part, "R, grad P", "P", "dp")
                                         |   loss = add(share, once)
    """

    name: ClassVar[str] = "insert_data_conversions"
    leaves: ClassVar[Level] = Level.SPREAD

    def apply(self, program: Program, plan: Plan | None) -> Program:
        assert plan is not None
        if plan.mesh.dp == 1 and plan.accumulation == 1:
            return program
        program = program.copy_blocks()
        types = data_types(program)
        if types.coupling is not None:
            types.coupling.check(plan)
        for name, results in types.results.items():
            _convert_block(program.blocks[name], types.strategies, results, plan)
        return program


def _convert_block(
    block: Block, strategies: Mapping[fx.Node, Strategy], results: Sequence[Placement], plan: Plan
) -> None:
    made: dict[tuple[fx.Node, Placement], fx.Node] = {}

    def read_as(value: fx.Node, wanted: Placement, reader: fx.Node) -> fx.Node:
        given = strategies[value].output
        if given == wanted:
            return value
        if (value, wanted) not in made:
            over_tp = Strategy((info(value).placement,), info(value).placement)
            new = value
            with block.graph.inserting_before(reader):
                if plan.accumulation > 1 and becomes_share(given, wanted):
                    new = block.graph.call_function(torch.ops.aten.div.Tensor, (value, plan.accumulation))
                    set_info(new, replace(info(value), role=Role.OP, ref="", strategy=over_tp))
                if plan.mesh.dp > 1:
                    new = block.graph.call_function(convert, (new, str(given), str(wanted), AXIS.name))
                    set_info(new, replace(info(value), role=Role.CONVERT, ref="", strategy=over_tp))
            made[value, wanted] = new
        return made[value, wanted]

    for node in block.ops:
        map_operands(node, strategies[node].inputs, read_as)
    leaving = zip(block.results, results, strict=True)
    block.output.args = (tuple(read_as(value, wanted, block.output) for value, wanted in leaving),)
