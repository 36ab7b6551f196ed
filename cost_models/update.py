"""What follows the pipeline: the gradient norm, the optimizer's update, the sum of tied gradients."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost_models.collectives import Group, collective_time_s
from autopar.cost_models.compute import ModelPrice, StageShape
from autopar.cost_models.setting import Setting
from autopar.cost_models.stage_ledger import TimeTerm
from autopar.cost_models.stage_memory import stage_parameters
from autopar.cost_models.states import optimizer_state_bytes

# Reads and writes of foreach (unfused) optimizers over those of a fused one (COST_MODEL 2.1: 1.3-2).
_FOREACH_TRAFFIC = 1.5
# On the host these are fused; the others run op by op, each of which reads and writes what it needs (assumed).
_FUSED_ON_CPU = ("Adam", "AdamW", "SGD", "Adagrad")
_OP_BY_OP_TRAFFIC = 3.0


def after_pipeline(price: ModelPrice, ranks: Sequence[Sequence[StageShape]], setting: Setting) -> tuple[TimeTerm, ...]:
    """What every rank does once all stages have ended."""
    hardware, states, mesh = setting.hardware, setting.states, setting.mesh
    shards = states.shards if setting.sharding.zero >= 1 else 1
    parameters = max(sum(stage_parameters(price, shape) for shape in shapes) for shapes in ranks)
    update_s = update_time_s(parameters, setting)
    world = Group(mesh.world_size, min(mesh.world_size, hardware.gpus_per_node))
    norm_s = collective_time_s("all_reduce", 8, world, hardware)
    terms = [TimeTerm("optimizer, gradient norm", update_s + norm_s)]
    if setting.compute.precision == "fp16":
        # Read and written once more. That a step overflows is seen by the norm: no all-reduce, no wait of its own.
        terms.append(
            TimeTerm("unscaling of gradients", parameters / shards * 2 * states.master_bytes / _states_rate(setting))
        )
    if mesh.pp > 1 and price.epilogue.tied_parameters:
        tied_bytes = price.epilogue.tied_parameters * states.master_bytes / shards
        far = Group(2, 2 if mesh.world_size <= hardware.gpus_per_node else 1)
        terms.append(TimeTerm("tied gradients", collective_time_s("all_reduce", tied_bytes, far, hardware)))
    return tuple(terms)


def update_time_s(parameters: float, setting: Setting) -> float:
    """Seconds in which a rank updates its part of `parameters` elements: of memory traffic, the host's with offload."""
    states = setting.states
    # Read the gradient twice (norm, update); read and write the weight and each state.
    touched = 4 * states.master_bytes + 2 * optimizer_state_bytes(setting.optimizer, setting.compute.precision)
    traffic = _FOREACH_TRAFFIC
    if setting.sharding.offload and setting.hardware.host:
        traffic = 1.0 if setting.optimizer.name in _FUSED_ON_CPU else _OP_BY_OP_TRAFFIC
    return parameters / (states.shards if setting.sharding.zero >= 1 else 1) * touched * traffic / _states_rate(setting)


def _states_rate(setting: Setting) -> float:
    """Bytes/s of the memory where masters and states lie."""
    hardware = setting.hardware
    if setting.sharding.offload and hardware.host:
        return hardware.host.memory_bytes_per_s
    return hardware.memory_bytes_per_s * hardware.memory_efficiency
