"""Turn `convert` into the runtime's collectives, by the table of placements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopar.ir.graph import Program, arguments
from autopar.ir.ops import COLLECTIVES, convert
from autopar.placement import Placement, conversion
from autopar.plan.plan import Plan
from autopar.rules.verify import Level


@dataclass(frozen=True)
class LowerConversions:
    """One collective a conversion.

    Requires: conversions of the table. Ensures: no `convert` is left.

        convert(x, "S(1)", "Rp", "tp")   |   all_gather(x, 1, axis="tp")
    """

    name: ClassVar[str] = "lower_conversions"
    leaves: ClassVar[Level] = Level.LOWERED

    def apply(self, program: Program, plan: Plan | None) -> Program:
        program = program.copy_blocks()
        for _, node in program.each_op():
            if node.target is not convert:
                continue
            value, source_text, target_text, axis = arguments(node)
            source, target = Placement.parse(source_text), Placement.parse(target_text)
            found = conversion(source, target)
            assert found is not None
            dims = tuple(p.dim for p in (source, target) if p.is_shard)
            node.target = COLLECTIVES[found.function]
            node.args, node.kwargs = (value, *dims), {"axis": axis}
        return program
