"""What a pass is."""

from __future__ import annotations

from typing import ClassVar, Protocol

from autopar.ir.graph import Program
from autopar.plan.plan import Plan
from autopar.rules.verify import Level


class Pass(Protocol):
    """Takes a valid program and returns a valid program; options are the fields of the dataclass.

    `plan` is None for the PREPARE passes, which run before there is one.
    """

    name: ClassVar[str]

    @property
    def leaves(self) -> Level:
        """As what it leaves the program: so it is checked."""

    def apply(self, program: Program, plan: Plan | None) -> Program: ...
