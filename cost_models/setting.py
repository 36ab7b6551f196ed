"""What the stages of a plan share, and what their costs depend on beside themselves."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.collectives import Group, axis_group, sharding_groups
from autopar.cost_models.hardware import Hardware
from autopar.cost_models.states import States
from autopar.mesh import Mesh
from autopar.plan import Optimizer, Plan
from autopar.schedules import Held, held


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
    hsdp: int | None = None
    offload: bool = False
    virtual_stages: int = 1

    @property
    def states(self) -> States:
        data = self.mesh.dp * self.mesh.cp
        shards = self.hsdp or data
        copies = data // shards
        return States(
            self.zero,
            self.micro_batches,
            shards,
            self.precision,
            self.optimizer,
            self.reduce_dtype,
            copies,
            self.offload,
        )

    @property
    def data_group(self) -> Group:
        return axis_group(self.mesh, "data", self.hardware.gpus_per_node)

    @property
    def sharding_groups(self) -> tuple[Group, Group]:
        """The ranks that share out one copy, and those that hold the same part of theirs."""
        return sharding_groups(self.mesh, self.states.shards, self.hardware.gpus_per_node)

    @property
    def in_halves(self) -> bool:
        """Backward computes the gradients of inputs first, those of weights later."""
        return self.schedule == "zero-bubble"

    def held(self, rank: int) -> tuple[Held, ...]:
        """The micro-batches that a pipeline rank holds at its fullest times."""
        return held(self.schedule, rank, self.mesh.pp, self.micro_batches, self.virtual_stages)


def setting_of(plan: Plan, hardware: Hardware) -> Setting:
    """The plan's choices that its stages share."""
    return Setting(
        mesh=plan.mesh,
        micro_batches=plan.accumulation,
        schedule=plan.schedule,
        zero=plan.zero,
        precision=plan.precision,
        optimizer=plan.optimizer,
        hardware=hardware,
        reduce_dtype=plan.reduce_dtype,
        hsdp=plan.hsdp,
        offload=plan.offload,
        virtual_stages=plan.virtual_stages,
    )
