"""What the stages of a plan share, and what their costs depend on beside themselves."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.collectives import Group, axis_group, sharding_groups
from autopar.cost_models.hardware import Hardware
from autopar.cost_models.states import States
from autopar.plan.plan import Optimizer, Plan
from autopar.plan.schedules import InFlight, fullest_times
from autopar.runtime.choices import Batch, Compute, Mesh, Sharding


@dataclass(frozen=True)
class StageContext:
    """The choices of a plan and the machine."""

    mesh: Mesh
    batch: Batch
    schedule: str
    virtual_stages: int
    sharding: Sharding
    compute: Compute
    optimizer: Optimizer
    hardware: Hardware

    @property
    def micro_batches(self) -> int:
        """On each data-parallel rank."""
        return self.batch.micro_batches(self.mesh.dp)

    @property
    def states(self) -> States:
        data = self.mesh.dp * self.mesh.cp
        shards = self.sharding.hsdp or data
        return States(
            self.sharding.zero,
            self.micro_batches,
            shards,
            self.compute.precision,
            self.optimizer,
            self.compute.reduce_dtype,
            data // shards,
            self.sharding.offload,
        )

    @property
    def data_group(self) -> Group:
        return axis_group(self.mesh, "data", self.hardware.gpus_per_node)

    @property
    def sharding_groups(self) -> tuple[Group, Group]:
        """The ranks that share out one copy, and those that hold the same part of theirs."""
        return sharding_groups(self.mesh, self.states.shards, self.hardware.gpus_per_node)

    @property
    def splits_backward(self) -> bool:
        """Backward computes the gradients of inputs first, those of weights later."""
        return self.schedule == "zero-bubble"

    def fullest_times(self, rank: int) -> tuple[InFlight, ...]:
        """The micro-batches that a pipeline rank holds at its fullest times."""
        return fullest_times(self.schedule, rank, self.mesh.pp, self.micro_batches, self.virtual_stages)


def stage_context_of(plan: Plan, hardware: Hardware) -> StageContext:
    """The plan's choices that its stages share."""
    schedule, virtual_stages = plan.pipeline.schedule, plan.virtual_stages
    return StageContext(
        plan.mesh, plan.batch, schedule, virtual_stages, plan.sharding, plan.compute, plan.optimizer, hardware
    )
