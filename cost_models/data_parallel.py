"""Time of communication over the data axis, and how much of it delays the step.

When collectives run, by ZeRO stage (DESIGN §6): 0 and 1 reduce in the last backward, 2 and 3 in each; 1 and 2
gather parameters in the first forward, 3 in every forward and every backward. Between the groups of hsdp the reduced
parts are all-reduced in the last backward. With offload a gather follows the copy of this rank's masters to the device,
and a reduction is followed by the copy of its part to the host, over PCIe each way.

How much of them hides behind computing, in a first form without a mutual slow-down:

gathers:    unit i's all-gather runs while unit i−1 computes (prefetch depth 1): exposed = the first one's,
            plus what each other one takes longer than the unit before it
reductions: unit i's gradient is ready when its backward ends; they queue on one stream: exposed = what is
            left after the last backward (an exact simulation over the units)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.cost_models.block import BlockPrice
from autopar.cost_models.collectives import axis_group, collective_time_s
from autopar.cost_models.compute import ModelPrice, StageShape, stage_blocks
from autopar.cost_models.stage_context import StageContext
from autopar.cost_models.stage_memory import end_parameters


@dataclass(frozen=True)
class Overlap:
    """Seconds of communication that delay the step, and seconds that do not."""

    exposed_s: float = 0.0
    hidden_s: float = 0.0

    def __add__(self, other: Overlap) -> Overlap:
        return Overlap(self.exposed_s + other.exposed_s, self.hidden_s + other.hidden_s)


@dataclass(frozen=True)
class DataTime:
    """Data-axis and tp-sync communication of one stage, by when it runs."""

    first_forward: Overlap = Overlap()
    each_forward: Overlap = Overlap()
    each_backward: Overlap = Overlap()
    last_backward: Overlap = Overlap()


def data_time(price: ModelPrice, shape: StageShape, context: StageContext) -> DataTime:
    """Communication of a stage over the data axis, and tp's gradient reductions, which no bucket hides."""
    time, within = _gradient_time(price, shape, context), Overlap(_values_time_s(price, shape, context))
    return replace(time, each_backward=time.each_backward + within)


def _values_time_s(price: ModelPrice, shape: StageShape, context: StageContext) -> float:
    """Seconds of what forward and backward of a micro-batch exchange over dp: values of the whole batch."""
    group = axis_group(context.mesh, "dp", context.hardware.gpus_per_node)
    blocks = [(block, count) for block, count, _ in stage_blocks(price, shape) if group.ranks > 1]
    return sum(
        n * collective_time_s(kind, size if kind == "all_reduce" else size * group.ranks, group, context.hardware)
        for block, n in blocks
        for kind, size in block.data  # of one replica: samples that are gathered are those of all
    )


def _gradient_time(price: ModelPrice, shape: StageShape, context: StageContext) -> DataTime:
    sync_s = sum(block.sync_s * count for block, count, _ in stage_blocks(price, shape))
    if context.data_group.ranks == 1 and not context.sharding.offload:
        sync = Overlap(sync_s)
        return DataTime(each_backward=sync) if context.sharding.zero >= 2 else DataTime(last_backward=sync)
    units, share = _units(price, shape, context), context.hardware.overlap
    forward = gathers([unit.forward_s for unit in units], [unit.gather_s for unit in units], share)
    units.reverse()
    backward_s, reduce_s = [unit.backward_s for unit in units], [unit.reduce_s for unit in units]
    copies = reductions(backward_s, [unit.copies_s for unit in units], share)
    waited = Overlap()
    if not context.states.reduces_behind_backward:
        waited, reduce_s = Overlap(sum(reduce_s)), [0.0] * len(units)
    if context.sharding.zero == 3:
        # One stream carries this unit's reduction and the next one's gather; the first gather is exposed.
        gather_s = [unit.gather_s for unit in units]
        following = [*gather_s[1:], 0.0]
        queue = [reduce + gather for reduce, gather in zip(reduce_s, following, strict=True)]
        backward = reductions(backward_s, queue, share) + waited + Overlap(gather_s[0] + sync_s)
        return DataTime(each_forward=forward, each_backward=backward, last_backward=copies)
    backward = reductions(backward_s, reduce_s, share) + waited + Overlap(sync_s)
    if context.sharding.zero == 0:
        return DataTime(last_backward=backward)
    if context.sharding.zero == 1:
        return DataTime(first_forward=forward, last_backward=backward + copies)
    return DataTime(first_forward=forward, each_backward=backward, last_backward=copies)


@dataclass(frozen=True)
class _Unit:
    """One fully_shard unit: computing and communication, in seconds."""

    forward_s: float
    backward_s: float
    gather_s: float
    reduce_s: float
    copies_s: float  # all-reduce of the reduced parts between the groups of hsdp, once a step


def _units(price: ModelPrice, shape: StageShape, context: StageContext) -> list[_Unit]:
    """In the order they are gathered: what both ends read, what precedes the layers, a unit a layer, what follows."""
    states, hardware = context.states, context.hardware
    group, copies = context.sharding_groups
    reduction = "all_reduce" if context.sharding.zero == 0 else "reduce_scatter"
    host = hardware.host if context.sharding.offload else None

    def unit(parameters: int, block: BlockPrice | None = None, recompute_s: float = 0.0, size: int = 1) -> _Unit:
        parameters *= size
        part_bytes = parameters * states.master_bytes / states.shards
        over_pcie_s = part_bytes / host.link_bytes_per_s if host else 0.0
        forward_s, backward_s = (block.forward.total_s, block.backward.total_s) if block else (0.0, 0.0)
        return _Unit(
            size * forward_s,
            size * (backward_s + recompute_s),
            over_pcie_s + collective_time_s("all_gather", parameters * states.compute_bytes, group, hardware),
            over_pcie_s + collective_time_s(reduction, parameters * states.reduce_bytes, group, hardware),
            collective_time_s("all_reduce", parameters * states.reduce_bytes / states.shards, copies, hardware),
        )

    ends = end_parameters(price, shape)
    units = [unit(ends.shared), unit(ends.first, price.prologue if shape.first else None)]
    for block, count, chosen in zip(price.classes, shape.counts, shape.recomputed, strict=True):
        for what, n in chosen:  # a group is one unit
            again = block.recomputed(what)
            units += [unit(block.parameters, block, again.time.total_s, again.group)] * (n // again.group)
        units += [unit(block.parameters, block)] * (count - sum(n for _, n in chosen))
    return [*units, unit(ends.last, price.epilogue if shape.last else None)]


def gathers(compute_s: Sequence[float], gather_s: Sequence[float], share: float = 1.0) -> Overlap:
    """All-gathers of the units in the order they compute; `share` of a collective can be hidden."""
    if not gather_s:
        return Overlap()
    exposed = gather_s[0]
    for compute, gather in zip(compute_s, gather_s[1:], strict=False):
        exposed += max(gather * (1 - share), gather - compute)
    return Overlap(exposed, sum(gather_s) - exposed)


def reductions(compute_s: Sequence[float], reduce_s: Sequence[float], share: float = 1.0) -> Overlap:
    """Reductions of the units in the order their backward ends; `share` of a collective can be hidden."""
    ready = stream = blocked = 0.0
    for compute, reduce in zip(compute_s, reduce_s, strict=True):
        ready += compute + reduce * (1 - share)
        blocked += reduce * (1 - share)
        stream = max(stream, ready) + reduce * share
    exposed = blocked + max(0.0, stream - ready)
    return Overlap(exposed, sum(reduce_s) - exposed)
