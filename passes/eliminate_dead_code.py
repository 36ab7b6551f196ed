"""Remove ops and placeholders that nothing reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopar.ir.build import eliminate_dead
from autopar.ir.graph import Program, Role
from autopar.plan.plan import Plan
from autopar.rules.verify import Level


@dataclass(frozen=True)
class EliminateDeadCode:
    """Drop what no result depends on, except the values a call passes in by position.

    Requires: nothing. Ensures: every op and parameter of a block is used.

        y = linear(h, w); z = relu(h); return y   |   y = linear(h, w); return y
    """

    name: ClassVar[str] = "eliminate_dead_code"
    leaves: ClassVar[Level] = Level.LOWERED

    def apply(self, program: Program, plan: Plan | None) -> Program:
        program = program.copy_blocks()
        for block in program.blocks.values():
            values = block.placeholders(Role.VALUE)
            assert all(node.users for node in values), "a call passes only what its block reads"
            eliminate_dead(block.graph)
        return program
