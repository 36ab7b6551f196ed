"""Type every node and parameter as the plan's solutions say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopar.errors import PlanError
from autopar.ir.graph import Program, node_inputs, set_strategy
from autopar.placement import REPLICATE, Strategy
from autopar.plan.plan import Plan
from autopar.rules.verify import Level


@dataclass(frozen=True)
class ShardParameters:
    """Write the plan's strategies on an axis into the nodes; a parameter's output is its stored placement.

    Requires: a program whose node names are the plan's. Ensures: every node has a strategy.

        w: parameter [256, 64]   |   w: parameter [256, 64], Shard(0)@tp
    """

    name: ClassVar[str] = "shard_parameters"
    leaves: ClassVar[Level] = Level.TYPED
    axis: str = "tp"

    def apply(self, program: Program, plan: Plan | None) -> Program:
        assert plan is not None
        program = program.copy_blocks()
        solution = plan.context if self.axis == "cp" else plan.solution
        for block in program.blocks.values():
            chosen = solution.strategies.get(block.name)
            if plan.mesh.size(self.axis) == 1 or not program.count(block.name) or chosen is None:
                chosen = {n.name: Strategy((REPLICATE,) * len(node_inputs(n)), REPLICATE) for n in block.nodes}
            for node in block.nodes:
                strategy = chosen.get(node.name)
                if strategy is None:
                    raise PlanError(
                        f"the plan has no placement for {block.name}.{node.name}: it was made for another model or "
                        "version; plan again"
                    )
                set_strategy(node, strategy, self.axis)
        return program
