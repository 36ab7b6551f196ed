"""Turn `convert` into the runtime's collectives, by the table of placements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopar.ir.graph import Program, Role, info
from autopar.ir.ops import COLLECTIVES, convert
from autopar.placement import conversion
from autopar.plan import Plan


@dataclass(frozen=True)
class LowerConversions:
    """One collective a conversion.

    Requires: conversions of the table. Ensures: no `convert` is left.

        convert(x, "S(1)", "Rp", "tp")   |   all_gather(x, 1, axis="tp")
    """

    name: ClassVar[str] = "lower_conversions"

    def apply(self, program: Program, plan: Plan | None) -> Program:
        program = program.copy_blocks()
        for _, node in program.each_op():
            if node.target is not convert:
                continue
            facts = info(node)
            assert facts.role is Role.CONVERT and facts.strategy is not None
            source, target = facts.strategy.inputs[0], facts.strategy.output
            found = conversion(source, target)
            assert found is not None
            dims = tuple(p.dim for p in (source, target) if p.is_shard)
            axis = node.args[3]
            node.target = COLLECTIVES[found.function]
            node.args, node.kwargs = (node.args[0], *dims), {"axis": axis}
        return program
