"""Mark the layers whose activations backward computes again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from autopar.errors import PlanError
from autopar.ir.graph import Program
from autopar.plan import Plan


@dataclass(frozen=True)
class InsertRecompute:
    """A layer named by the plan is emitted inside torch.utils.checkpoint (non-reentrant).

    Requires: a program of layers. Ensures: `recompute` holds the plan's layer indices.

        x = self._layer(x)   |   x = checkpoint(self._layer, x, use_reentrant=False)
    """

    name: ClassVar[str] = "insert_recompute"

    def apply(self, program: Program, plan: Plan | None) -> Program:
        assert plan is not None
        layers = len(program.layer_calls)
        unknown = [i for i in plan.recompute if not 0 <= i < layers]
        if unknown:
            raise PlanError(f"recompute names layers {unknown}, but {program.name} has layers 0 to {layers - 1}")
        return replace(program, recompute=frozenset(plan.recompute))
