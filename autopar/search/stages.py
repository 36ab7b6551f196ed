"""Time and memory of ranges of layers as the stages of a rank, with the cheapest recompute that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import mul

from autopar.cost_models.compute import ModelPrice, StageShape, stage_blocks, stage_shape, stage_time
from autopar.cost_models.data_parallel import data_time
from autopar.cost_models.hardware import Hardware
from autopar.cost_models.memory import (
    activation_room_bytes,
    host_room_bytes,
    ledger,
    rank_host_ledger,
    rank_ledger,
    total_bytes,
)
from autopar.cost_models.stage_context import StageContext
from autopar.cost_models.stage_memory import StageMemory, memory_of, recompute_bytes
from autopar.plan.recompute import LAYER, RecomputeChoice, group_of, recompute_choices, regions_of

from .boundaries import TIE, Ranges, split
from .pins import Recompute, Request
from .recompute import Chosen, ClassOptions, Option, cheapest
from .space import Choice

Shapes = tuple[StageShape, ...]  # of the stages of a rank

LEANEST = ("groups of 8", "full", "none")  # one of these pins of recompute keeps least


@dataclass(frozen=True)
class RankCost:
    """Seconds of a micro-batch through a rank, its peak bytes, and what to recompute, by stage and class."""

    time_s: float
    size_bytes: float
    recomputed: tuple[tuple[Chosen, ...], ...]


_TOO_MUCH = RankCost(inf, inf, ())
Known = dict[tuple[int, Shapes, int], RankCost]  # by rank, its stages, slices of the loss


class StageCosts:
    """Time and memory of any ranges of layers as the stages of a rank, with the cheapest recompute that fits.

    `limit_s`: a rank slower than this cannot win; it counts as one that does not fit. `known`: costs of the same
    choice and solution, found within this limit or a longer one.
    """

    def __init__(
        self,
        choice: Choice,
        price: ModelPrice,
        request: Request,
        hardware: Hardware,
        limit_s: float = inf,
        known: Known | None = None,
    ) -> None:
        self.price = price
        self.request = request
        self.limit_s = limit_s
        self.context = context_of(choice, request, hardware)
        # What it receives is the one part of a stage that its neighbours decide.
        self.grows = _grows(price)
        self.work_s = price.work_until_s
        self._costs: Known = {} if known is None else known
        self._ranges: dict[tuple[int, Ranges], RankCost] = {}

    def split(self) -> Ranges | None:
        """The best ranges where each rank has one stage."""
        return split(len(self.price.layers), self.context.mesh.pp, self, self.work_s, self.limit_s, self.grows)

    def __call__(self, stage: int, start: int, stop: int) -> tuple[float, float]:
        """(seconds of one micro-batch, peak bytes) of layers [start, stop) as the only stage of rank `stage`."""
        cost = self.rank_cost(stage, ((start, stop),))
        return cost.time_s, cost.size_bytes

    def recompute(self, ranges: Ranges) -> tuple[RecomputeChoice, ...]:
        """What to recompute: of the first layers of each class in each stage."""
        if (pinned := self.request.pins.recompute_choices) is not None:
            return pinned
        chosen: dict[int, str] = {}
        pp = self.context.mesh.pp
        for rank in range(pp):
            own = ranges[rank::pp]
            for (start, stop), of_stage in zip(own, self.rank_cost(rank, own).recomputed, strict=True):
                left = [[what for what, n in of_class for _ in range(n)] for of_class in of_stage]
                for layer in range(start, stop):
                    if of_class := left[self.price.layers[layer]]:
                        chosen[layer] = of_class.pop(0)
        return recompute_choices(chosen)

    def average_bytes(self) -> float:
        """The average rank, everything recomputed: some rank needs at least as much."""
        price, pp, context = self.price, self.context.mesh.pp, self.context
        # So many micro-batches in each of its stages at one time.
        counts = min(max(min(time.activations) for time in context.fullest_times(rank)) for rank in range(pp))
        saved = price.least_saved_bytes / pp
        average = StageMemory(price.parameters // pp, 0, (), saved, 0.0, counts)
        return total_bytes(ledger(average, context.states, context.hardware, context.mesh.world_size))

    def rank_cost(self, rank: int, ranges: Ranges) -> RankCost:
        """The cost of a rank whose stages have these layers."""
        if sum(self.work_s[stop] - self.work_s[start] for start, stop in ranges) > self.limit_s:
            return _TOO_MUCH
        if (rank, ranges) not in self._ranges:
            # Ranges of the same contents cost the same: classes are few, layers many.
            shapes = tuple(self._shape(*of_stage) for of_stage in ranges)
            # Slices of the loss are of the last stage alone.
            chunks = self.price.loss_chunks if any(shape.last for shape in shapes) else 1
            if (key := (rank, shapes, chunks)) not in self._costs:
                self._costs[key] = self._solve(rank, shapes)
            cost = self._costs[key]
            self._ranges[rank, ranges] = cost if cost.time_s <= self.limit_s else _TOO_MUCH
        return self._ranges[rank, ranges]

    def _shape(self, start: int, stop: int) -> StageShape:
        return stage_shape(self.price, start, stop, self.request.pins.recompute_choices or ())

    def _solve(self, rank: int, shapes: Shapes) -> RankCost:
        """With the first of the sets to recompute that fits."""
        costs = (self._priced(rank, shapes, chosen) for chosen in self._choices(rank, shapes))
        return next((cost for cost in costs if cost.size_bytes < inf), _TOO_MUCH)

    def _priced(self, rank: int, shapes: Shapes, chosen: tuple[tuple[Chosen, ...], ...]) -> RankCost:
        shapes = tuple(replace(shape, recomputed=of_stage) for shape, of_stage in zip(shapes, chosen, strict=True))
        size_bytes = total_bytes(rank_ledger(self.price, shapes, rank, self.context))
        if size_bytes > self.request.budget_bytes * TIE or not self._host_holds(rank, shapes):
            return _TOO_MUCH
        time_s = 0.0
        for shape in shapes:
            data = data_time(self.price, shape, self.context)
            time_s += data.each_forward.exposed_s + data.each_backward.exposed_s
            time_s += stage_time(self.price, shape, self.context.splits_backward).total_s
        return RankCost(time_s if time_s <= self.limit_s else inf, size_bytes, chosen)

    def _host_holds(self, rank: int, shapes: Shapes) -> bool:
        if not self.context.sharding.offload:
            return True
        kept = rank_host_ledger(self.price, shapes, rank, self.context)
        return total_bytes(kept) <= host_room_bytes(self.context.hardware)

    def _choices(self, rank: int, shapes: Shapes) -> Iterator[tuple[tuple[Chosen, ...], ...]]:
        """What to recompute of each class on each stage: as pinned, or the cheapest set that fits.

        What fits at the fullest time may not fit when a rank holds more of another stage; what fits as if the most
        of each were held at once does.
        """
        pins, context = self.request.pins, self.context
        if context.splits_backward or pins.recompute is not None:
            pin = "none" if context.splits_backward else pins.recompute or "none"
            yield tuple(pinned_recompute(pin, self.price, shape) for shape in shapes)
            return
        memory = memory_of(self.price, shapes, rank, context)
        world_size, budget = context.mesh.world_size, self.request.budget_bytes
        room = activation_room_bytes(memory, context.states, context.hardware, world_size, budget)
        saved = [
            shape.kept_bytes + sum(n * block.saved_bytes for block, n, _ in stage_blocks(self.price, shape))
            for shape in shapes
        ]
        times = [time.activations for time in context.fullest_times(rank)]
        fullest = max(times, key=lambda counts: sum(map(mul, counts, saved)))
        most = tuple(map(max, *times)) if len(times) > 1 else fullest
        # Slower ones are of no use.
        room_s = self.limit_s - sum(stage_time(self.price, shape, context.splits_backward).total_s for shape in shapes)
        classes = len(self.price.classes)
        for counts in dict.fromkeys((fullest, most)):
            kept_bytes = sum(map(mul, counts, saved))
            found = self._cheapest(shapes, counts, kept_bytes, memory.transient_bytes, room, room_s)
            if found is not None:
                yield tuple(found[at * classes : (at + 1) * classes] for at in range(len(shapes)))

    def _cheapest(
        self,
        shapes: Shapes,
        counts: Sequence[int],
        saved_bytes: float,
        transient_bytes: float,
        room_bytes: float,
        room_s: float,
    ) -> tuple[Chosen, ...] | None:
        """The set that fits where a rank holds so many micro-batches in each of its stages, by stage and class."""
        if saved_bytes + transient_bytes <= room_bytes:
            return ((),) * sum(len(shape.counts) for shape in shapes)
        classes: list[ClassOptions] = []
        for shape, in_flight in zip(shapes, counts, strict=True):
            after_bytes = self.price.epilogue.saved_bytes if shape.last else 0.0
            classes += [
                ClassOptions(count, self._options(index, in_flight, after_bytes) if count else ())
                for index, count in enumerate(shape.counts)
            ]
        return cheapest(classes, saved_bytes, transient_bytes, room_bytes, room_s)

    def _options(self, index: int, in_flight: int, after_bytes: float) -> tuple[Option, ...]:
        """What may be recomputed of a class; `after_bytes` are free again when backward comes to the layers."""
        block, options = self.price.classes[index], []
        for what in self.price.choices[index]:
            price = block.recomputed(what)
            freed = in_flight * (block.saved_bytes - price.saved_bytes)
            workspace = recompute_bytes(block, [price]) - after_bytes
            options.append(Option(what, price.time.total_s, freed, workspace, price.group))
        return tuple(options)


def _grows(price: ModelPrice) -> bool:
    """Whether more layers before those of a stage never make it need less: where all boundaries receive the same."""
    inner = slice(1, len(price.layers))
    return all(len(set(line[inner])) <= 1 for line in (price.boundaries.values_bytes, price.boundaries.received_bytes))


def context_of(choice: Choice, request: Request, hardware: Hardware) -> StageContext:
    """What the stages of a choice share."""
    return StageContext(
        choice.mesh, choice.batch, choice.schedule, choice.virtual_stages, choice.sharding, request.compute,
        request.optimizer, hardware,
    )  # fmt: skip


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
        there = {name for choice in price.classes[index].recompute for name in regions_of(choice)}
        what = ", ".join(name for name in names if name in there)
    return ((what, count),) if what else ()
