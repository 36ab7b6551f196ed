"""Stage boundaries by dynamic programming on the real costs of layers, ends of the model included.

Two exact passes: the least time of the slowest stage, then, among the splits that reach it, the least memory of
the fullest stage.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from autopar.cost_models.compute import ModelPrice, StageShape, stage_shape, stage_time
from autopar.cost_models.data_parallel import data_time
from autopar.cost_models.hardware import Hardware
from autopar.cost_models.memory import StageMemory, activation_room_bytes, again_bytes, ledger, total_bytes
from autopar.cost_models.setting import Setting
from autopar.cost_models.step_time import host_room_bytes, memory_of, stage_host_ledger, stage_ledger
from autopar.recompute import LAYER, Again, again_of, group_of, regions_of

from .recompute import Chosen, ClassOptions, Option, cheapest
from .space import Choice, Recompute, Request

Ranges = tuple[tuple[int, int], ...]
# (stage, start, stop) → (seconds, bytes) of layers [start, stop) as that stage; inf where it does not fit.
StageCost = Callable[[int, int, int], tuple[float, float]]

LEANEST = ("groups of 8", "full", "none")  # one of these pins of recompute keeps least

_TIE = 1 + 1e-9


def split(
    layers: int,
    stages: int,
    cost: StageCost,
    work_s: Sequence[float] | None = None,
    limit_s: float = inf,
    grows: bool = False,
) -> Ranges | None:
    """Layers [0, layers) in `stages` ranges of at least one layer; None if no split fits within `limit_s`.

    These only save time: work_s[n], seconds that the first n layers take at least, differences being bounds of
    ranges; grows, a promise that a range that does not fit fits no better with more layers before it.
    """
    if stages == 1:  # also a model without layers, which is all prologue and epilogue
        only_s = cost(0, 0, layers)[0]
        return ((0, layers),) if only_s <= limit_s and only_s < inf else None
    if layers < stages:
        return None
    least_s = work_s or [0.0] * (layers + 1)
    # Any split bounds the best one from above; the even one is near it.
    even = [(stage, layers * stage // stages, layers * (stage + 1) // stages) for stage in range(stages)]
    even_s = max(cost(*at)[0] for at in even) * _TIE
    best = _bottleneck(layers, stages, lambda *at: cost(*at)[0], least_s, min(limit_s, even_s), grows)
    if best is None:
        return None
    slowest_s = best[0] * _TIE

    def memory_bytes(stage: int, start: int, stop: int) -> float:
        time_s, size_bytes = cost(stage, start, stop)
        return size_bytes if time_s <= slowest_s else inf

    least = _bottleneck(layers, stages, memory_bytes, least_s, slowest_s, grows)
    assert least is not None, "the split of the first pass qualifies"
    return least[1]


def _bottleneck(
    layers: int,
    stages: int,
    cost: Callable[[int, int, int], float],
    least_s: Sequence[float],
    limit_s: float,
    grows: bool,
) -> tuple[float, Ranges] | None:
    """The split whose largest cost is least: best[n] over splits of the first n layers in the stages so far.

    Ranges that take more than `limit_s`, or leave too much for the stages to come, are not asked for.
    """
    best: list[float] = [0.0] + [inf] * layers
    cuts: list[list[int]] = []
    for stage in range(stages):
        after, cut = [inf] * (layers + 1), [-1] * (layers + 1)
        to_come = stages - 1 - stage
        for stop in [layers] if to_come == 0 else range(stage + 1, layers - to_come + 1):
            if to_come and least_s[layers] - least_s[stop] > limit_s * to_come:
                continue
            for start in range(stop - 1, max(stage, bisect_left(least_s, least_s[stop] - limit_s)) - 1, -1):
                if best[start] < after[stop]:
                    own = cost(stage, start, stop)
                    if own == inf and grows:
                        break
                    if max(best[start], own) < after[stop]:
                        after[stop], cut[stop] = max(best[start], own), start
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
    recomputed: tuple[Chosen, ...]


_TOO_MUCH = _StageCost(inf, inf, ())


class StageCosts:
    """Time and memory of any range of layers as a stage, with the cheapest recompute that fits the budget.

    `limit_s`: a stage slower than this cannot win; it counts as one that does not fit.
    """

    def __init__(
        self, choice: Choice, price: ModelPrice, request: Request, hardware: Hardware, limit_s: float = inf
    ) -> None:
        self.price = price
        self.request = request
        self.limit_s = limit_s
        self.setting = setting_for(choice, request, hardware)
        # Receive buffers are the one part of a stage that its neighbours decide.
        self.grows = len({block.output_bytes for block in price.classes}) <= 1
        self._prefix = price.counts_until
        self.work_s = price.work_until_s
        self._costs: dict[tuple[int, StageShape], _StageCost] = {}
        self._ranges: dict[tuple[int, int, int], _StageCost] = {}

    def __call__(self, stage: int, start: int, stop: int) -> tuple[float, float]:
        """(seconds of one micro-batch, peak bytes) of layers [start, stop) as `stage`."""
        cost = self._cost(stage, start, stop)
        return cost.time_s, cost.size_bytes

    def recompute(self, ranges: Ranges) -> tuple[Again, ...]:
        """What to recompute: of the first layers of each class in each stage."""
        if (pinned := self.request.pins.again) is not None:
            return pinned
        chosen: dict[int, str] = {}
        for stage, (start, stop) in enumerate(ranges):
            left = [[what for what, n in own for _ in range(n)] for own in self._cost(stage, start, stop).recomputed]
            for layer in range(start, stop):
                if own := left[self.price.layers[layer]]:
                    chosen[layer] = own.pop(0)
        return again_of(chosen)

    def average_bytes(self) -> float:
        """The average stage, everything recomputed: some stage needs at least as much."""
        price, stages = self.price, self.setting.mesh.pp
        held = min(self.setting.in_flight(stage) for stage in range(stages))
        average = StageMemory(price.parameters // stages, 0, (), price.least_saved_bytes / stages, 0.0, held)
        setting = self.setting
        return total_bytes(ledger(average, setting.states, setting.hardware, setting.mesh.world_size))

    def _shape(self, start: int, stop: int) -> StageShape:
        counts = tuple(b - a for a, b in zip(self._prefix[start], self._prefix[stop], strict=True))
        if (pinned := self.request.pins.again) is not None:
            return stage_shape(self.price, start, stop, pinned)
        return StageShape(counts, ((),) * len(counts), start == 0, stop == len(self.price.layers))

    def _cost(self, stage: int, start: int, stop: int) -> _StageCost:
        at = (stage, start, stop)
        if self.work_s[stop] - self.work_s[start] > self.limit_s:
            return _TOO_MUCH
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
        if size_bytes > self.request.budget_bytes * _TIE or not self._host_holds(stage, shape, layers):
            return _TOO_MUCH
        data = data_time(self.price, shape, self.setting)
        exposed_s = data.each_forward.exposed_s + data.each_backward.exposed_s
        time_s = stage_time(self.price, shape).total_s + exposed_s
        if time_s > self.limit_s:
            return _TOO_MUCH
        return _StageCost(time_s, size_bytes, counts)

    def _host_holds(self, stage: int, shape: StageShape, layers: tuple[int, int]) -> bool:
        if not self.setting.offload:
            return True
        kept = stage_host_ledger(self.price, shape, stage, layers, self.setting)
        return total_bytes(kept) <= host_room_bytes(self.setting.hardware)

    def _choose(self, stage: int, shape: StageShape, layers: tuple[int, int]) -> tuple[Chosen, ...] | None:
        """What to recompute of each class, as pinned or the cheapest set that fits; None if none does."""
        pins = self.request.pins
        if pins.recompute is not None:
            return pinned_recompute(pins.recompute, self.price, shape)
        memory = memory_of(self.price, shape, stage, layers, self.setting)
        world_size = self.setting.mesh.world_size
        room = activation_room_bytes(
            memory, self.setting.states, self.setting.hardware, world_size, self.request.budget_bytes
        )
        after_bytes = self.price.epilogue.saved_bytes if shape.last else 0.0
        classes = [
            ClassOptions(count, self._options(index, memory.in_flight, after_bytes) if count else ())
            for index, count in enumerate(shape.counts)
        ]
        return cheapest(classes, memory.in_flight * memory.saved_bytes, memory.transient_bytes, room)

    def _options(self, index: int, in_flight: int, after_bytes: float) -> tuple[Option, ...]:
        """What may be recomputed of a class; `after_bytes` are free again when backward comes to the layers."""
        block, options = self.price.classes[index], []
        for what in self.price.choices[index]:
            again = block.recomputed(what)
            freed = in_flight * (block.saved_bytes - again.saved_bytes)
            workspace = again_bytes(block, [again]) - after_bytes
            options.append(Option(what, again.time.total_s, freed, workspace, again.group))
        return tuple(options)


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
        request.pins.reduce_dtype,
        choice.hsdp,
        choice.offload,
    )


def pinned_recompute(pin: Recompute, price: ModelPrice, shape: StageShape) -> tuple[Chosen, ...]:
    """What a pin recomputes of each class on a stage; where it names layers, the shape has it already."""
    if isinstance(pin, tuple):
        return shape.recomputed
    left = pin if isinstance(pin, int) else sum(shape.counts)
    chosen: list[Chosen] = []
    for index, count in enumerate(shape.counts):
        own = min(count, left)
        left -= own
        chosen.append(_pinned_class(LAYER if isinstance(pin, int) or pin == "full" else pin, price, index, own))
    return tuple(chosen)


def _pinned_class(what: str, price: ModelPrice, index: int, count: int) -> Chosen:
    """Of the regions named those that the class has; layers that fill no group are recomputed each by itself."""
    if not count or what == "none":
        return ()
    if (size := group_of(what)) > 1:
        grouped = count // size * size if price.longest_chains[index] >= size else 0
        return tuple((name, n) for name, n in ((what, grouped), (LAYER, count - grouped)) if n)
    if names := regions_of(what):
        there = {name for choice in price.classes[index].again for name in regions_of(choice)}
        what = ", ".join(name for name in names if name in there)
    return ((what, count),) if what else ()
