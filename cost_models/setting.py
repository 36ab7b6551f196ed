"""What the stages of a plan share, and what their costs depend on beside themselves."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.collectives import Group, axis_group
from autopar.cost_models.hardware import Hardware
from autopar.cost_models.memory import States
from autopar.cost_models.pipeline import in_flight
from autopar.mesh import Mesh
from autopar.plan import Optimizer, Plan


@dataclass(frozen=True)
class Setting:
    """The choices of a plan and the machine."""

    mesh: Mesh
    micro_batches: int
    schedule: str
    zero: int
    precision: str
    optimizer: Optimizer
    hardware: Hardware
    reduce_dtype: str | None = None

    @property
    def states(self) -> States:
        shards = self.mesh.dp * self.mesh.cp
        return States(self.zero, self.micro_batches, shards, self.precision, self.optimizer, self.reduce_dtype)

    @property
    def data_group(self) -> Group:
        return axis_group(self.mesh, "data", self.hardware.gpus_per_node)

    def in_flight(self, stage: int) -> int:
        return in_flight(self.schedule, stage, self.mesh.pp, self.micro_batches)


def setting_of(plan: Plan, hardware: Hardware) -> Setting:
    """The plan's choices that its stages share."""
    return Setting(
        plan.mesh,
        plan.accumulation,
        plan.schedule,
        plan.zero,
        plan.precision,
        plan.optimizer,
        hardware,
        plan.reduce_dtype,
    )
