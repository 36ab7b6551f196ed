"""Which micro-batches and replicas a model allows whose loss is no sum over samples."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import PlanError
from ..plan.plan import Plan


@dataclass(frozen=True)
class Coupling:
    """Why a model's samples cannot be spread freely: at which op (short), with the graph around it (detail).

    replicas: whether dp may nevertheless be more than one.
    """

    short: str
    detail: str
    replicas: bool

    def __str__(self) -> str:
        return f"{self.short}: one micro-batch{'' if self.replicas else ', dp=1'}"

    def check(self, plan: Plan) -> None:
        """PlanError for a plan that it forbids."""
        if plan.accumulation > 1 or plan.mesh.dp > 1 and not self.replicas:
            way = "micro_batch=global_batch/dp" if self.replicas else "dp=1, micro_batch=global_batch"
            raise PlanError(
                f"dp={plan.mesh.dp} with {plan.accumulation} micro-batches would not compute the model: {self.detail}\n"
                f"  use {way} (pp and tp are free)"
            )
