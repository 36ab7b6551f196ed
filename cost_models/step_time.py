"""Time and memory of a training step under a plan: prices of blocks → stages → simulated pipeline → step.

    step = pipeline (with data-axis communication that does not hide) + tied gradients + norm, optimizer

When data-axis collectives run, by ZeRO stage (DESIGN §6): 0 and 1 reduce in the last backward, 2 and 3 in
each; 1 and 2 gather parameters in the first forward, 3 in every forward and every backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.cost_models.collectives import Group, axis_group, collective_time_s
from autopar.cost_models.compute import (
    BlockPrice,
    ModelPrice,
    StageShape,
    StageTime,
    price_model,
    stage_shape,
    stage_time,
)
from autopar.cost_models.hardware import Cluster, Hardware
from autopar.cost_models.layer_costs import ModelCosts
from autopar.cost_models.memory import (
    MemoryTerm,
    StageMemory,
    States,
    ledger,
    optimizer_state_bytes,
    root_parameters,
    stage_memory,
    total_bytes,
)
from autopar.cost_models.overlap import Overlap, gathers, reductions
from autopar.cost_models.pipeline import in_flight, simulate_one
from autopar.mesh import Mesh
from autopar.plan import Optimizer, Plan

# Reads and writes of foreach (unfused) optimizers over those of a fused one (COST_MODEL 2.1: 1.3-2).
_FOREACH_TRAFFIC = 1.5
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
    recomputed: int
    time: tuple[TimeTerm, ...]
    memory: tuple[MemoryTerm, ...]

    @property
    def micro_batch_s(self) -> float:
        return sum(term.time_s for term in self.time)

    @property
    def peak_bytes(self) -> float:
        return total_bytes(self.memory)


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


@dataclass(frozen=True)
class DataTime:
    """Data-axis and tp-sync communication of one stage, by when it runs."""

    first_forward: Overlap = Overlap()
    each_forward: Overlap = Overlap()
    each_backward: Overlap = Overlap()
    last_backward: Overlap = Overlap()


@dataclass(frozen=True)
class Setting:
    """What all stages of a plan share, and what its costs depend on beside the stages themselves."""

    mesh: Mesh
    micro_batches: int
    schedule: str
    zero: int
    precision: str
    optimizer: Optimizer
    hardware: Hardware

    @property
    def states(self) -> States:
        shards = self.mesh.dp * self.mesh.cp
        return States(self.zero, self.micro_batches, shards, self.precision, self.optimizer)

    @property
    def data_group(self) -> Group:
        return axis_group(self.mesh, "data", self.hardware.gpus_per_node)

    def in_flight(self, stage: int) -> int:
        return in_flight(self.schedule, stage, self.mesh.pp, self.micro_batches)


def estimate(model: ModelCosts, plan: Plan, cluster: Cluster) -> Estimate:
    """Predict a plan. `model` must be the costs of the plan's tp solution."""
    assert model.tp == plan.mesh.tp, f"costs for tp={model.tp} with a plan for tp={plan.mesh.tp}"
    hardware = cluster.hardware
    price = price_model(model, [plan.micro_batch], plan.sequence, hardware, plan.precision)[0]
    return estimate_price(price, plan, hardware)


def estimate_price(price: ModelPrice, plan: Plan, hardware: Hardware) -> Estimate:
    """`estimate`, for a model already priced at the plan's micro-batch."""
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
            sum(shapes[i].recomputed),
            _time_terms(times[i], data[i], setting.micro_batches),
            stage_ledger(price, shapes[i], i, plan.stages[i], setting),
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


def setting_of(plan: Plan, hardware: Hardware) -> Setting:
    """The plan's choices that its stages share."""
    return Setting(plan.mesh, plan.accumulation, plan.schedule, plan.zero, plan.precision, plan.optimizer, hardware)


def stage_ledger(
    price: ModelPrice, shape: StageShape, stage: int, layers: tuple[int, int], setting: Setting
) -> tuple[MemoryTerm, ...]:
    """The memory terms of one stage."""
    memory = memory_of(price, shape, stage, layers, setting)
    return ledger(memory, setting.states, setting.hardware, setting.mesh.world_size)


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


def data_time(price: ModelPrice, shape: StageShape, setting: Setting) -> DataTime:
    """Communication of a stage over the data axis, and tp's gradient reductions, which no bucket hides."""
    time, within = _gradient_time(price, shape, setting), Overlap(_values_time_s(price, shape, setting))
    return replace(time, each_backward=time.each_backward + within)


def _values_time_s(price: ModelPrice, shape: StageShape, setting: Setting) -> float:
    """Seconds of what forward and backward of a micro-batch exchange over dp: values of the whole batch."""
    group = axis_group(setting.mesh, "dp", setting.hardware.gpus_per_node)
    blocks = [(block, count) for block, count in _blocks(price, shape) if group.ranks > 1]
    return sum(n * collective_time_s(c, size, group, setting.hardware) for block, n in blocks for c, size in block.data)


def _gradient_time(price: ModelPrice, shape: StageShape, setting: Setting) -> DataTime:
    sync_s = sum(block.sync_s * count for block, count in _blocks(price, shape))
    if setting.data_group.ranks == 1:
        sync = Overlap(sync_s)
        return DataTime(each_backward=sync) if setting.zero >= 2 else DataTime(last_backward=sync)
    units = _units(price, shape, setting)
    share = setting.hardware.overlap
    forward = gathers([unit.forward_s for unit in units], [unit.gather_s for unit in units], share)
    backward_s = [unit.backward_s for unit in reversed(units)]
    reduce_s = [unit.reduce_s for unit in reversed(units)]
    if setting.zero == 3:
        # One stream carries this unit's reduction and the next one's gather; the first gather is exposed.
        gather_s = [unit.gather_s for unit in reversed(units)]
        queue = [reduce + following for reduce, following in zip(reduce_s, [*gather_s[1:], 0.0], strict=True)]
        backward = reductions(backward_s, queue, share) + Overlap(gather_s[0] + sync_s)
        return DataTime(each_forward=forward, each_backward=backward)
    backward = reductions(backward_s, reduce_s, share) + Overlap(sync_s)
    if setting.zero == 0:
        return DataTime(last_backward=backward)
    if setting.zero == 1:
        return DataTime(first_forward=forward, last_backward=backward)
    return DataTime(first_forward=forward, each_backward=backward)


@dataclass(frozen=True)
class _Unit:
    """One fully_shard unit: computing and communication, in seconds."""

    forward_s: float
    backward_s: float
    gather_s: float
    reduce_s: float


def _units(price: ModelPrice, shape: StageShape, setting: Setting) -> list[_Unit]:
    """The root first (gathered before all, reduced after all), then a unit a layer."""
    states, group, hardware = setting.states, setting.data_group, setting.hardware
    reduction = "all_reduce" if setting.zero == 0 else "reduce_scatter"

    def unit(forward_s: float, backward_s: float, parameters: int) -> _Unit:
        return _Unit(
            forward_s,
            backward_s,
            collective_time_s("all_gather", parameters * states.compute_bytes, group, hardware),
            collective_time_s(reduction, parameters * states.master_bytes, group, hardware),
        )

    root, _ = root_parameters(price, shape)
    first = price.prologue if shape.first else None
    units = [unit(first.forward.total_s if first else 0.0, first.backward.total_s if first else 0.0, root)]
    for block, count, again in zip(price.classes, shape.counts, shape.recomputed, strict=True):
        plain = unit(block.forward.total_s, block.backward.total_s, block.parameters)
        longer = replace(plain, backward_s=plain.backward_s + plain.forward_s)
        units += [longer] * again + [plain] * (count - again)
    return units


def _blocks(price: ModelPrice, shape: StageShape) -> list[tuple[BlockPrice, int]]:
    ends = [(price.prologue, int(shape.first)), (price.epilogue, int(shape.last))]
    return [*zip(price.classes, shape.counts, strict=True), *ends]


def _after_pipeline(price: ModelPrice, shapes: list[StageShape], setting: Setting) -> tuple[TimeTerm, ...]:
    """What every rank does once all stages have ended."""
    hardware, states, mesh = setting.hardware, setting.states, setting.mesh
    shards = states.shards if setting.zero >= 1 else 1
    per_state = optimizer_state_bytes(setting.optimizer, setting.precision)
    # Read the gradient twice (norm, update); read and write the weight and each state.
    touched = 4 * states.master_bytes + 2 * per_state
    parameters = max(sum(block.parameters * count for block, count in _blocks(price, shape)) for shape in shapes)
    rate = hardware.memory_bytes_per_s * hardware.memory_efficiency
    update_s = parameters / shards * touched * _FOREACH_TRAFFIC / rate
    world = Group(mesh.world_size, min(mesh.world_size, hardware.gpus_per_node))
    norm_s = collective_time_s("all_reduce", 8, world, hardware)
    terms = [TimeTerm("optimizer, gradient norm", update_s + norm_s)]
    if mesh.pp > 1 and price.epilogue.tied_parameters:
        tied_bytes = price.epilogue.tied_parameters * states.master_bytes / shards
        far = Group(2, 2 if mesh.world_size <= hardware.gpus_per_node else 1)
        terms.append(TimeTerm("tied gradients", collective_time_s("all_reduce", tied_bytes, far, hardware)))
    return tuple(terms)


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
        TimeTerm("launch floor", both.launch_s),
        TimeTerm("recompute", time.recompute.total_s),
        TimeTerm("dp communication", exposed_s, each.hidden_s + once.hidden_s / micro_batches),
    )


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
    losses["memory"] = losses.pop("recompute")
    losses["bubble"] = bubble_s
    losses["optimizer"] = sum(term.time_s for term in after)
    worst = max(losses, key=lambda name: losses[name])
    return worst if losses[worst] >= _WORTH_NAMING * step_s else "compute"
