"""Stage boundaries by dynamic programming on the real costs of layers, ends of the model included.

Two exact passes: the least possible time of the slowest stage, then, among the splits that reach it, the least possible
memory of the fullest stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from autopar.cost_models.compute import ModelPrice, StageShape, stage_shape, stage_time
from autopar.cost_models.hardware import Hardware
from autopar.cost_models.memory import activation_room_bytes, again_bytes, total_bytes
from autopar.cost_models.step_time import Setting, data_time, memory_of, stage_ledger

from .recompute import ClassOption, cheapest
from .space import Choice, Request

Ranges = tuple[tuple[int, int], ...]
# (stage, start, stop) → (seconds, bytes) of layers [start, stop) as that stage; inf seconds where it does not fit.
StageCost = Callable[[int, int, int], tuple[float, float]]
# (start, stop) → seconds that the range takes at least.
LowerBound = Callable[[int, int], float]

_TIE = 1 + 1e-9


def split(layers: int, stages: int, cost: StageCost, least_s: LowerBound | None = None) -> Ranges | None:
    """Layers [0, layers) in `stages` ranges of at least one layer; None if no split fits.

    least_s: a lower bound of a range's seconds that grows with the range; it only saves work.
    """
    if layers < stages:
        return None
    bound = least_s or (lambda start, stop: 0.0)
    best = _bottleneck(layers, stages, lambda *at: cost(*at)[0], bound, inf)
    if best is None:
        return None
    slowest_s = best[0] * _TIE

    def memory_bytes(stage: int, start: int, stop: int) -> float:
        time_s, size_bytes = cost(stage, start, stop)
        return size_bytes if time_s <= slowest_s else inf

    least = _bottleneck(layers, stages, memory_bytes, bound, slowest_s)
    assert least is not None, "the split of the first pass qualifies"
    return least[1]


def _bottleneck(
    layers: int, stages: int, cost: Callable[[int, int, int], float], least_s: LowerBound, limit_s: float
) -> tuple[float, Ranges] | None:
    """The split whose largest cost is least: best[n] over splits of the first n layers in the stages so far.

    Ranges whose bound exceeds `limit_s` are not asked for; nor, where the cost is a time (no limit), those whose bound
    exceeds the best that is known.
    """
    best: list[float] = [0.0] + [inf] * layers
    cuts: list[list[int]] = []
    for stage in range(stages):
        after = [inf] * (layers + 1)
        cut = [-1] * (layers + 1)
        last = layers - (stages - 1 - stage)  # leave a layer for each stage to come
        for stop in [layers] if stage == stages - 1 else range(stage + 1, last + 1):
            for start in range(stop - 1, stage - 1, -1):
                if least_s(start, stop) > (limit_s if limit_s < inf else after[stop]):
                    break
                if best[start] < after[stop]:
                    worst = max(best[start], cost(stage, start, stop))
                    if worst < after[stop]:
                        after[stop], cut[stop] = worst, start
        best, cuts = after, [*cuts, cut]
    return None if best[layers] == inf else (best[layers], _ranges(cuts, layers))


def _ranges(cuts: list[list[int]], layers: int) -> Ranges:
    stop, ranges = layers, []
    for cut in reversed(cuts):
        ranges.append((cut[stop], stop))
        stop = cut[stop]
    return tuple(reversed(ranges))


@dataclass(frozen=True)
class _StageCost:
    time_s: float
    size_bytes: float
    recomputed: tuple[int, ...]


_TOO_MUCH = _StageCost(inf, inf, ())


class StageCosts:
    """Time and memory of any range of layers as a stage, with the cheapest recompute that fits the budget.

    `limit_s`: a stage slower than this cannot win; it is left out, and `reached_limit` says that this happened.
    """

    def __init__(
        self, choice: Choice, price: ModelPrice, request: Request, hardware: Hardware, limit_s: float = inf
    ) -> None:
        self.price = price
        self.request = request
        self.limit_s = limit_s
        self.reached_limit = False
        self.setting = setting_for(choice, request, hardware)
        self._prefix = _prefix_counts(price)
        self._work_s = _prefix_work(price)
        self._costs: dict[tuple[int, StageShape], _StageCost] = {}
        self._ranges: dict[tuple[int, int, int], _StageCost] = {}

    def __call__(self, stage: int, start: int, stop: int) -> tuple[float, float]:
        """(seconds of one micro-batch, peak bytes) of layers [start, stop) as `stage`."""
        cost = self._cost(stage, start, stop)
        return cost.time_s, cost.size_bytes

    def recompute(self, ranges: Ranges) -> tuple[int, ...]:
        """The layers to recompute: the first ones of each class in each stage."""
        pinned = self.request.pins.recompute
        if isinstance(pinned, tuple):
            return pinned
        chosen: list[int] = []
        for stage, (start, stop) in enumerate(ranges):
            left = list(self._cost(stage, start, stop).recomputed)
            for layer in range(start, stop):
                if left[self.price.layers[layer]]:
                    left[self.price.layers[layer]] -= 1
                    chosen.append(layer)
        return tuple(chosen)

    def least_s(self, start: int, stop: int) -> float:
        """Seconds of the range without recompute and data-axis communication; inf above the limit."""
        time_s = self._work_s[stop] - self._work_s[start]
        if time_s > self.limit_s:
            self.reached_limit = True
            return inf
        return time_s

    def _shape(self, start: int, stop: int) -> StageShape:
        counts = tuple(b - a for a, b in zip(self._prefix[start], self._prefix[stop], strict=True))
        pinned = self.request.pins.recompute
        if isinstance(pinned, tuple):
            return stage_shape(self.price, start, stop, pinned)
        return StageShape(counts, (0,) * len(counts), start == 0, stop == len(self.price.layers))

    def _cost(self, stage: int, start: int, stop: int) -> _StageCost:
        at = (stage, start, stop)
        if at not in self._ranges:
            # Ranges of the same contents cost the same: classes are few, layers many.
            shape = self._shape(start, stop)
            if (stage, shape) not in self._costs:
                self._costs[stage, shape] = self._solve(stage, shape, (start, stop))
            self._ranges[at] = self._costs[stage, shape]
        return self._ranges[at]

    def _solve(self, stage: int, shape: StageShape, layers: tuple[int, int]) -> _StageCost:
        counts = self._choose(stage, shape, layers)
        if counts is None:
            return _TOO_MUCH
        shape = replace(shape, recomputed=counts)
        size_bytes = total_bytes(stage_ledger(self.price, shape, stage, layers, self.setting))
        if size_bytes > self.request.budget_bytes * _TIE:
            return _TOO_MUCH
        data = data_time(self.price, shape, self.setting)
        exposed_s = data.each_forward.exposed_s + data.each_backward.exposed_s
        time_s = stage_time(self.price, shape).total_s + exposed_s
        if time_s > self.limit_s:
            self.reached_limit = True
            return _TOO_MUCH
        return _StageCost(time_s, size_bytes, counts)

    def _choose(self, stage: int, shape: StageShape, layers: tuple[int, int]) -> tuple[int, ...] | None:
        """Layers of each class to recompute: as pinned, or the cheapest set that fits; None if nothing fits."""
        pins = self.request.pins
        if pins.recompute is not None:
            return pinned_recompute(pins.recompute, shape)
        memory = memory_of(self.price, shape, stage, layers, self.setting)
        world_size = self.setting.mesh.world_size
        room = activation_room_bytes(
            memory, self.setting.states, self.setting.hardware, world_size, self.request.budget_bytes
        )
        after_bytes = self.price.epilogue.saved_bytes if shape.last else 0.0
        options = [
            ClassOption(
                count,
                block.forward.total_s,
                memory.in_flight * (block.saved_bytes - block.input_bytes),
                again_bytes(block, True) - after_bytes,
            )
            for block, count in zip(self.price.classes, shape.counts, strict=True)
        ]
        return cheapest(options, memory.in_flight * memory.saved_bytes, memory.transient_bytes, room)


def setting_for(choice: Choice, request: Request, hardware: Hardware) -> Setting:
    """What the stages of a choice share."""
    return Setting(
        choice.mesh,
        choice.micro_batches,
        choice.schedule,
        choice.zero,
        request.precision,
        request.optimizer,
        hardware,
    )


def pinned_recompute(pin: str | int | tuple[int, ...], shape: StageShape) -> tuple[int, ...]:
    """Layers of each class that a pin recomputes on a stage; indices are already in the shape."""
    if isinstance(pin, tuple):
        return shape.recomputed
    if pin == "none":
        return (0,) * len(shape.counts)
    left = sum(shape.counts) if pin == "full" else int(pin)
    chosen = []
    for count in shape.counts:
        chosen.append(min(count, left))
        left -= chosen[-1]
    return tuple(chosen)


def _prefix_counts(price: ModelPrice) -> list[tuple[int, ...]]:
    """Layers of each class among the first n."""
    counts = [0] * len(price.classes)
    prefix = [tuple(counts)]
    for layer in price.layers:
        counts[layer] += 1
        prefix.append(tuple(counts))
    return prefix


def _prefix_work(price: ModelPrice) -> list[float]:
    """Seconds of the first n layers, the ends of the model counted with the first and last one."""
    work = [0.0]
    for layer in price.layers:
        work.append(work[-1] + price.classes[layer].work_s)
    work[1:] = [seconds + price.prologue.work_s for seconds in work[1:]]
    work[-1] += price.epilogue.work_s
    return work
