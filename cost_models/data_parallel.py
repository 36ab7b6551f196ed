"""Time of communication over the data axis, and how much of it delays the step.

When collectives run, by ZeRO stage (DESIGN §6): 0 and 1 reduce in the last backward, 2 and 3 in each; 1 and 2
gather parameters in the first forward, 3 in every forward and every backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.cost_models.collectives import axis_group, collective_time_s
from autopar.cost_models.compute import ModelPrice, StageShape, stage_blocks
from autopar.cost_models.memory import root_parameters
from autopar.cost_models.overlap import Overlap, gathers, reductions
from autopar.cost_models.setting import Setting


@dataclass(frozen=True)
class DataTime:
    """Data-axis and tp-sync communication of one stage, by when it runs."""

    first_forward: Overlap = Overlap()
    each_forward: Overlap = Overlap()
    each_backward: Overlap = Overlap()
    last_backward: Overlap = Overlap()


def data_time(price: ModelPrice, shape: StageShape, setting: Setting) -> DataTime:
    """Communication of a stage over the data axis, and tp's gradient reductions, which no bucket hides."""
    time, within = _gradient_time(price, shape, setting), Overlap(_values_time_s(price, shape, setting))
    return replace(time, each_backward=time.each_backward + within)


def _values_time_s(price: ModelPrice, shape: StageShape, setting: Setting) -> float:
    """Seconds of what forward and backward of a micro-batch exchange over dp: values of the whole batch."""
    group = axis_group(setting.mesh, "dp", setting.hardware.gpus_per_node)
    blocks = [(block, count) for block, count, _ in stage_blocks(price, shape) if group.ranks > 1]
    return sum(n * collective_time_s(c, size, group, setting.hardware) for block, n in blocks for c, size in block.data)


def _gradient_time(price: ModelPrice, shape: StageShape, setting: Setting) -> DataTime:
    sync_s = sum(block.sync_s * count for block, count, _ in stage_blocks(price, shape))
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
            collective_time_s(reduction, parameters * states.reduce_bytes, group, hardware),
        )

    root, _ = root_parameters(price, shape)
    first = price.prologue if shape.first else None
    units = [unit(first.forward.total_s if first else 0.0, first.backward.total_s if first else 0.0, root)]
    for block, count, chosen in zip(price.classes, shape.counts, shape.recomputed, strict=True):
        forward_s, backward_s = block.forward.total_s, block.backward.total_s
        for what, n in chosen:  # a group is one unit
            again = block.recomputed(what)
            longer_s, size = backward_s + again.time.total_s, again.group
            units += [unit(size * forward_s, size * longer_s, size * block.parameters)] * (n // size)
        units += [unit(forward_s, backward_s, block.parameters)] * (count - sum(n for _, n in chosen))
    return units
