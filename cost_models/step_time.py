"""Time and memory of a training step under a plan: prices of blocks → stages → simulated pipeline → step.

step = pipeline (with data-axis communication that does not hide) + tied gradients + norm, optimizer
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from autopar.cost_models.block import PhaseTime
from autopar.cost_models.collectives import Group, collective_time_s
from autopar.cost_models.compute import (
    ModelPrice,
    StageShape,
    StageTime,
    price_model,
    stage_blocks,
    stage_shape,
    stage_time,
)
from autopar.cost_models.data_parallel import DataTime, data_time
from autopar.cost_models.hardware import Cluster, Hardware
from autopar.cost_models.layer_costs import ModelCosts
from autopar.cost_models.memory import (
    MemoryTerm,
    StageMemory,
    host_ledger,
    ledger,
    optimizer_state_bytes,
    stage_memory,
    total_bytes,
)
from autopar.cost_models.pipeline import simulate_one
from autopar.cost_models.setting import Setting, setting_of
from autopar.plan import Plan

# Reads and writes of foreach (unfused) optimizers over those of a fused one (COST_MODEL 2.1: 1.3-2).
_FOREACH_TRAFFIC = 1.5
# On the host these are fused; the others run op by op, each of which reads and writes what it needs (assumed).
_FUSED_ON_CPU = ("Adam", "AdamW", "SGD", "Adagrad")
_OP_BY_OP_TRAFFIC = 3.0
_RECOMPUTE = "recompute: "  # what begins the name of a term
# A loss is named in "limited by" from this share of the step on.
_WORTH_NAMING = 0.05


@dataclass(frozen=True)
class TimeTerm:
    """One line of a time ledger: seconds that delay the step, and seconds hidden behind others."""

    name: str
    time_s: float
    hidden_s: float = 0.0


@dataclass(frozen=True)
class StageLedger:
    """One stage: time of one micro-batch (terms add up to `micro_batch_s`), memory at the peak."""

    layers: tuple[int, int]
    recomputed: tuple[tuple[str, int], ...]  # (choice, layers)
    time: tuple[TimeTerm, ...]
    memory: tuple[MemoryTerm, ...]
    host: tuple[MemoryTerm, ...] = ()  # of offload: what a rank keeps in the host's memory

    @property
    def micro_batch_s(self) -> float:
        return sum(term.time_s for term in self.time)

    @property
    def peak_bytes(self) -> float:
        return total_bytes(self.memory)

    @property
    def host_bytes(self) -> float:
        return total_bytes(self.host)


@dataclass(frozen=True)
class Estimate:
    """The prediction for a plan. `step` adds up to `step_time_s`; `bubble` is a share of the pipeline."""

    step_time_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    peak_bytes: float
    bubble: float
    limited_by: str
    stages: tuple[StageLedger, ...]
    step: tuple[TimeTerm, ...]


def estimate(model: ModelCosts, plan: Plan, cluster: Cluster) -> Estimate:
    """Predict a plan. `model` must be the costs of the plan's tp solution."""
    assert model.tp == plan.mesh.tp, f"costs for tp={model.tp} with a plan for tp={plan.mesh.tp}"
    hardware = cluster.hardware
    price = price_model(model, [plan.micro_batch], plan.sequence, hardware, plan.precision)[0]
    return estimate_price(price, plan, hardware)


def estimate_price(price: ModelPrice, plan: Plan, hardware: Hardware) -> Estimate:
    """`estimate`, for a model already priced at the plan's micro-batch."""
    price = price.with_chunks(plan.loss_chunks)
    setting = setting_of(plan, hardware)
    shapes = [stage_shape(price, start, stop, plan.recompute) for start, stop in plan.stages]
    times = [stage_time(price, shape) for shape in shapes]
    data = [data_time(price, shape, setting) for shape in shapes]
    send_s = [send_time_s(price, stage, stop, setting) for stage, (_, stop) in enumerate(plan.stages[:-1])]
    pipeline_s, bubble = pipeline_time(times, data, send_s, setting)
    after = _after_pipeline(price, shapes, setting)
    step_s = pipeline_s + sum(term.time_s for term in after)
    stages = tuple(
        StageLedger(
            plan.stages[i],
            _recomputed(shapes[i]),
            _time_terms(times[i], data[i], setting.micro_batches),
            stage_ledger(price, shapes[i], i, plan.stages[i], setting),
            stage_host_ledger(price, shapes[i], i, plan.stages[i], setting),
        )
        for i in range(len(shapes))
    )
    tokens = plan.global_batch * plan.sequence
    flops = 3 * price.unsharded_flops * plan.accumulation * plan.mesh.dp
    world = plan.mesh.world_size
    return Estimate(
        step_time_s=step_s,
        tokens_per_s_per_gpu=tokens / step_s / world,
        mfu=flops / (step_s * world * hardware.peak(plan.precision)),
        peak_bytes=max(stage.peak_bytes for stage in stages),
        bubble=bubble,
        limited_by=_limited_by(stages, setting.micro_batches, bubble * pipeline_s, after, step_s),
        stages=stages,
        step=(TimeTerm("pipeline", pipeline_s), *after),
    )


def stage_ledger(
    price: ModelPrice, shape: StageShape, stage: int, layers: tuple[int, int], setting: Setting
) -> tuple[MemoryTerm, ...]:
    """The memory terms of one stage."""
    memory = memory_of(price, shape, stage, layers, setting)
    return ledger(memory, setting.states, setting.hardware, setting.mesh.world_size)


def stage_host_ledger(
    price: ModelPrice, shape: StageShape, stage: int, layers: tuple[int, int], setting: Setting
) -> tuple[MemoryTerm, ...]:
    """What a rank of one stage keeps on the host."""
    return host_ledger(memory_of(price, shape, stage, layers, setting), setting.states, setting.hardware)


def host_room_bytes(hardware: Hardware) -> float:
    """A rank's share of the host's memory; without end where the device is the host, whose memory is counted once."""
    return hardware.host.memory_bytes if hardware.host else inf


def memory_of(
    price: ModelPrice, shape: StageShape, stage: int, layers: tuple[int, int], setting: Setting
) -> StageMemory:
    """What the ledger needs of a stage, with the micro-batches that its schedule keeps in flight."""
    start, stop = layers
    receives = 0.0 if shape.first else price.classes[price.layers[start - 1]].output_bytes
    receives += 0.0 if shape.last else price.classes[price.layers[stop - 1]].output_bytes
    return stage_memory(price, shape, setting.in_flight(stage), receives)


def send_time_s(price: ModelPrice, stage: int, stop: int, setting: Setting) -> float:
    """Seconds to send one micro-batch from `stage` (whose last layer is stop − 1) to the next one."""
    size_bytes = price.classes[price.layers[stop - 1]].output_bytes
    return collective_time_s("send", size_bytes, stage_link(stage, setting), setting.hardware)


def stage_link(stage: int, setting: Setting) -> Group:
    """Two ranks, of this stage and the next: in one node if both stages lie in it."""
    ranks = setting.mesh.world_size // setting.mesh.pp
    per_node = setting.hardware.gpus_per_node
    together = stage * ranks // per_node == ((stage + 2) * ranks - 1) // per_node
    return Group(2, 2 if together else 1)


def pipeline_time(
    times: list[StageTime], data: list[DataTime], send_s: list[float], setting: Setting
) -> tuple[float, float]:
    """(seconds until the last stage ends, share of it that stages idle)."""
    m = setting.micro_batches
    forward, backward = [], []
    for time, comm in zip(times, data, strict=True):
        forward_s = time.forward.total_s + comm.each_forward.exposed_s
        backward_s = time.backward.total_s + time.recompute.total_s + comm.each_backward.exposed_s
        forward.append([forward_s + comm.first_forward.exposed_s] + [forward_s] * (m - 1))
        backward.append([backward_s] * m)
    ends = simulate_one(setting.schedule, forward, backward, send_s)
    # The reduction of the last micro-batch delays no other stage.
    ends = [end + comm.last_backward.exposed_s for end, comm in zip(ends, data, strict=True)]
    busy = sum(map(sum, forward)) + sum(map(sum, backward)) + sum(comm.last_backward.exposed_s for comm in data)
    idle = 1 - busy / (len(ends) * max(ends))
    return max(ends), idle if len(ends) > 1 else 0.0


def _recomputed(shape: StageShape) -> tuple[tuple[str, int], ...]:
    """Layers of the stage with each choice of recompute."""
    found: dict[str, int] = {}
    for what, n in (item for chosen in shape.recomputed for item in chosen):
        found[what] = found.get(what, 0) + n
    return tuple(found.items())


def _after_pipeline(price: ModelPrice, shapes: list[StageShape], setting: Setting) -> tuple[TimeTerm, ...]:
    """What every rank does once all stages have ended."""
    hardware, states, mesh = setting.hardware, setting.states, setting.mesh
    shards = states.shards if setting.zero >= 1 else 1
    parameters = max(sum(block.parameters * n for block, n, _ in stage_blocks(price, shape)) for shape in shapes)
    update_s = update_time_s(parameters, setting)
    world = Group(mesh.world_size, min(mesh.world_size, hardware.gpus_per_node))
    norm_s = collective_time_s("all_reduce", 8, world, hardware)
    terms = [TimeTerm("optimizer, gradient norm", update_s + norm_s)]
    if setting.precision == "fp16":
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
    touched = 4 * states.master_bytes + 2 * optimizer_state_bytes(setting.optimizer, setting.precision)
    traffic = _FOREACH_TRAFFIC
    if setting.offload and setting.hardware.host:
        traffic = 1.0 if setting.optimizer.name in _FUSED_ON_CPU else _OP_BY_OP_TRAFFIC
    return parameters / (states.shards if setting.zero >= 1 else 1) * touched * traffic / _states_rate(setting)


def _states_rate(setting: Setting) -> float:
    """Bytes/s of the memory where masters and states lie."""
    hardware = setting.hardware
    if setting.offload and hardware.host:
        return hardware.host.memory_bytes_per_s
    return hardware.memory_bytes_per_s * hardware.memory_efficiency


def _time_terms(time: StageTime, data: DataTime, micro_batches: int) -> tuple[TimeTerm, ...]:
    """One micro-batch, with the once-a-step communication spread over the micro-batches."""
    both = time.forward + time.backward
    once, each = data.first_forward + data.last_backward, data.each_forward + data.each_backward
    exposed_s = each.exposed_s + once.exposed_s / micro_batches
    return (
        TimeTerm("matmul", both.matmul_s),
        TimeTerm("attention", both.attention_s),
        TimeTerm("memory-bound ops", both.memory_s),
        TimeTerm("tp communication", both.tp_s),
        TimeTerm("cp communication", both.cp_s),
        TimeTerm("launch floor", both.launch_s),
        *(term for what, phase in time.again.items() for term in _again_terms(what, phase)),
        TimeTerm("dp communication", exposed_s, each.hidden_s + once.hidden_s / micro_batches),
    )


def _again_terms(what: str, phase: PhaseTime) -> list[TimeTerm]:
    """What a choice of recompute computes again, and the tp collectives that run again within it."""
    terms = [TimeTerm(f"{_RECOMPUTE}{what}", phase.total_s - phase.tp_s)]
    return [*terms, TimeTerm(f"{_RECOMPUTE}tp communication in {what}", phase.tp_s)] if phase.tp_s else terms


def _limited_by(
    stages: tuple[StageLedger, ...],
    micro_batches: int,
    bubble_s: float,
    after: tuple[TimeTerm, ...],
    step_s: float,
) -> str:
    """The largest loss of the slowest stage, or "compute" if none is worth naming."""
    slowest = max(stages, key=lambda stage: stage.micro_batch_s)
    losses = {
        term.name: term.time_s * micro_batches for term in slowest.time if term.name not in ("matmul", "attention")
    }
    again = [name for name in losses if name.startswith(_RECOMPUTE)]
    losses["memory"] = sum(losses.pop(name) for name in again)
    losses["bubble"] = bubble_s
    losses["optimizer"] = sum(term.time_s for term in after)
    worst = max(losses, key=lambda name: losses[name])
    return worst if losses[worst] >= _WORTH_NAMING * step_s else "compute"
