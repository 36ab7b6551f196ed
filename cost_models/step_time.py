"""Time and memory of a training step under a plan: prices of blocks → stages → simulated pipeline → step.

step = pipeline (with data-axis communication that does not hide) + tied gradients + norm, optimizer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost_models.collectives import Group, collective_time_s
from autopar.cost_models.compute import ModelPrice, StageShape, StageTime, price_model, stage_shape, stage_time
from autopar.cost_models.data_parallel import DataTime, data_time
from autopar.cost_models.hardware import Cluster, Hardware
from autopar.cost_models.layer_costs import ModelCosts
from autopar.cost_models.memory import rank_host_ledger, rank_ledger
from autopar.cost_models.pipeline import simulate_one
from autopar.cost_models.stage_context import StageContext, stage_context_of
from autopar.cost_models.stage_ledger import StageLedger, TimeTerm, limited_by, recomputed, time_terms
from autopar.cost_models.stage_memory import stage_parameters
from autopar.cost_models.states import optimizer_state_bytes
from autopar.plan.plan import Plan

# Reads and writes of foreach (unfused) optimizers over those of a fused one (COST_MODEL 2.1: 1.3-2).
_FOREACH_TRAFFIC = 1.5
# On the host these are fused; the others run op by op, each of which reads and writes what it needs (assumed).
_FUSED_ON_CPU = ("Adam", "AdamW", "SGD", "Adagrad")
_OP_BY_OP_TRAFFIC = 3.0


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
    price = price_model(model, [plan.batch.micro_batch], plan.batch.sequence, hardware, plan.compute.precision)[0]
    return estimate_price(price, plan, hardware)


def estimate_price(price: ModelPrice, plan: Plan, hardware: Hardware) -> Estimate:
    """`estimate`, for a model already priced at the plan's micro-batch."""
    price = price.with_chunks(plan.activations.loss_chunks)
    context = stage_context_of(plan, hardware)
    shapes = [stage_shape(price, start, stop, plan.activations.recompute) for start, stop in plan.pipeline.stages]
    times = [stage_time(price, shape, context.splits_backward) for shape in shapes]
    data = [data_time(price, shape, context) for shape in shapes]
    pipeline_s, bubble = pipeline_time(times, data, send_times(price, plan.pipeline.stages, context), context)
    pp = plan.mesh.pp
    after = after_pipeline(price, [shapes[rank::pp] for rank in range(pp)], context)
    step_s = pipeline_s + sum(term.time_s for term in after)
    stages = tuple(
        StageLedger(
            plan.pipeline.stages[rank::pp],
            recomputed(shapes[rank::pp]),
            time_terms(times[rank::pp], data[rank::pp], context.micro_batches),
            rank_ledger(price, shapes[rank::pp], rank, context),
            rank_host_ledger(price, shapes[rank::pp], rank, context),
        )
        for rank in range(pp)
    )
    tokens = plan.batch.global_batch * plan.batch.tokens
    flops = 3 * price.unsharded_flops * plan.accumulation * plan.mesh.dp
    world = plan.mesh.world_size
    return Estimate(
        step_time_s=step_s,
        tokens_per_s_per_gpu=tokens / step_s / world,
        mfu=flops / (step_s * world * hardware.peak(plan.compute.precision)),
        peak_bytes=max(stage.peak_bytes for stage in stages),
        bubble=bubble,
        limited_by=limited_by(stages, context.micro_batches, bubble * pipeline_s, after, step_s),
        stages=stages,
        step=(TimeTerm("pipeline", pipeline_s), *after),
    )


@dataclass(frozen=True)
class SendTimes:
    """Seconds of a micro-batch over each boundary of stages: its values to the next one, their gradients back."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


def send_times(price: ModelPrice, ranges: Sequence[tuple[int, int]], context: StageContext) -> SendTimes:
    """What the stages of these layers send each other."""

    def times(sizes: Sequence[float]) -> tuple[float, ...]:
        return tuple(
            collective_time_s("send", sizes[stop], stage_link(stage, context), context.hardware)
            for stage, (_, stop) in enumerate(ranges[:-1])
        )

    return SendTimes(times(price.boundaries.values_bytes), times(price.boundaries.gradients_bytes))


def stage_link(stage: int, context: StageContext) -> Group:
    """Two ranks, of this stage and the next: in one node if all of both lie in it."""
    pp, per_node = context.mesh.pp, context.hardware.gpus_per_node
    ranks = context.mesh.world_size // pp
    low, high = sorted((stage % pp, (stage + 1) % pp))
    together = low * ranks // per_node == ((high + 1) * ranks - 1) // per_node
    return Group(2, 2 if together else 1)


def pipeline_time(
    times: list[StageTime], data: list[DataTime], sends: SendTimes, context: StageContext
) -> tuple[float, float]:
    """(seconds until the last stage ends, share of it that stages idle)."""
    m, pp = context.micro_batches, context.mesh.pp
    forward = [time.forward.total_s + comm.each_forward.exposed_s for time, comm in zip(times, data, strict=True)]
    later = [time.later.total_s for time in times]
    backward = [
        time.backward.total_s - time.later.total_s + time.recompute.total_s + comm.each_backward.exposed_s
        for time, comm in zip(times, data, strict=True)
    ]
    first = [comm.first_forward.exposed_s for comm in data]
    ends = simulate_one(
        context.schedule, pp, m, forward, backward, sends.forward_s, back_s=sends.backward_s, first_s=first,
        weight_s=later,
    )  # fmt: skip
    # The reduction of the last micro-batch delays no other rank.
    last = [comm.last_backward.exposed_s for comm in data]
    ends = [end + sum(last[rank::pp]) for rank, end in enumerate(ends)]
    busy = m * (sum(forward) + sum(backward) + sum(later)) + sum(first) + sum(last)
    idle = 1 - busy / (pp * max(ends))
    return max(ends), idle if len(ends) > 1 else 0.0


def after_pipeline(
    price: ModelPrice, ranks: Sequence[Sequence[StageShape]], context: StageContext
) -> tuple[TimeTerm, ...]:
    """What every rank does once all stages have ended."""
    hardware, states, mesh = context.hardware, context.states, context.mesh
    shards = states.shards if context.sharding.zero >= 1 else 1
    parameters = max(sum(stage_parameters(price, shape) for shape in shapes) for shapes in ranks)
    update_s = update_time_s(parameters, context)
    world = Group(mesh.world_size, min(mesh.world_size, hardware.gpus_per_node))
    norm_s = collective_time_s("all_reduce", 8, world, hardware)
    terms = [TimeTerm("optimizer, gradient norm", update_s + norm_s)]
    if context.compute.precision == "fp16":
        # Read and written once more. That a step overflows is seen by the norm: no all-reduce, no wait of its own.
        terms.append(
            TimeTerm("unscaling of gradients", parameters / shards * 2 * states.master_bytes / _states_rate(context))
        )
    if mesh.pp > 1 and price.epilogue.tied_parameters:
        tied_bytes = price.epilogue.tied_parameters * states.master_bytes / shards
        far = Group(2, 2 if mesh.world_size <= hardware.gpus_per_node else 1)
        terms.append(TimeTerm("tied gradients", collective_time_s("all_reduce", tied_bytes, far, hardware)))
    return tuple(terms)


def update_time_s(parameters: float, context: StageContext) -> float:
    """Seconds in which a rank updates its part of `parameters` elements: of memory traffic, the host's with offload."""
    states = context.states
    # Read the gradient twice (norm, update); read and write the weight and each state.
    touched = 4 * states.master_bytes + 2 * optimizer_state_bytes(context.optimizer, context.compute.precision)
    traffic = _FOREACH_TRAFFIC
    if context.sharding.offload and context.hardware.host:
        traffic = 1.0 if context.optimizer.name in _FUSED_ON_CPU else _OP_BY_OP_TRAFFIC
    return parameters / (states.shards if context.sharding.zero >= 1 else 1) * touched * traffic / _states_rate(context)


def _states_rate(context: StageContext) -> float:
    """Bytes/s of the memory where masters and states lie."""
    hardware = context.hardware
    if context.sharding.offload and hardware.host:
        return hardware.host.memory_bytes_per_s
    return hardware.memory_bytes_per_s * hardware.memory_efficiency
