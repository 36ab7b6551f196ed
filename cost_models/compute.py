"""Time of computing on a stage: the model's blocks with numbers, and what of them a stage has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from autopar.cost_models.block import BlockPrice, PhaseTime, RecomputePrice, block_evaluator, price_block, price_values
from autopar.cost_models.boundary_values import Boundaries, boundary_evaluator
from autopar.cost_models.collectives import Group, axis_group
from autopar.cost_models.hardware import Hardware
from autopar.cost_models.layer_costs import B, ModelCosts, S
from autopar.errors import PlanError
from autopar.plan.recompute import RecomputeChoice, by_layer, choice, is_whole
from autopar.runtime.choices import Mesh

_GROUPS = (2, 3, 4, 6, 8)  # sizes that are searched


@dataclass(frozen=True)
class ModelPrice:
    """A model with numbers, at one micro-batch size. `layers[i]` is layer i's index in `classes`."""

    model: ModelCosts
    micro_batch: int
    prologue: BlockPrice
    classes: tuple[BlockPrice, ...]
    layers: tuple[int, ...]
    epilogue: BlockPrice
    unsharded_flops: float  # forward, of one micro-batch of the original model
    boundaries: Boundaries
    loss_chunks: int = 1
    epilogue_in: Callable[[int], BlockPrice] | None = None  # by chunks

    def with_chunks(self, chunks: int) -> ModelPrice:
        """The same with head and loss in `chunks` slices of the vocabulary; PlanError where they cannot be."""
        if chunks == self.loss_chunks:
            return self
        if self.epilogue_in is None:
            raise PlanError(f"loss_chunks={chunks}: {self.model.not_chunked}; use loss_chunks=1")
        return replace(self, loss_chunks=chunks, epilogue=self.epilogue_in(chunks))

    @property
    def work_s(self) -> float:
        """Forward and backward of one micro-batch through the whole model, without recompute."""
        return self.work_until_s[-1]

    @cached_property
    def balanced(self) -> dict[tuple[int, bool], tuple[tuple[int, int], ...] | None]:
        """Splits already found: (stages, backward in halves) → ranges whose slowest takes least, memory apart."""
        return {}

    @cached_property
    def chain_s(self) -> float:
        """Forward of one micro-batch, and backward without the gradients of weights: what cannot wait."""
        blocks = (self.prologue, *(self.classes[c] for c in self.layers), self.epilogue)
        return sum(block.forward.total_s + block.dgrad_wgrad[0].total_s for block in blocks)

    @cached_property
    def idle_s(self) -> tuple[float, float]:
        """Of the shortest layer: forward and backward; and in halves, where the gradients of weights fill theirs."""
        times = [self.classes[c] for c in {*self.layers}]
        dgrad_wgrad = (b.forward.total_s + b.dgrad_wgrad[0].total_s - b.dgrad_wgrad[1].total_s for b in times)
        return min((b.work_s for b in times), default=0.0), max(0.0, min(dgrad_wgrad, default=0.0))

    @cached_property
    def work_until_s(self) -> list[float]:
        """[n]: seconds of the first n layers, the ends of the model counted with the first and the last one."""
        work = [0.0, *accumulate(self.classes[c].work_s for c in self.layers)]
        work[1:] = [seconds + self.prologue.work_s for seconds in work[1:]]
        work[-1] += self.epilogue.work_s
        return work

    @cached_property
    def counts_until(self) -> list[tuple[int, ...]]:
        """[n]: layers of each class among the first n."""
        counts = [[0, *accumulate(int(c == index) for c in self.layers)] for index in range(len(self.classes))]
        return list(zip(*counts, strict=True)) or [()]

    @cached_property
    def least_saved_bytes(self) -> float:
        """Activations of a micro-batch in the whole model, each layer with the choice that keeps least."""
        kept = self.prologue.saved_bytes + self.epilogue.saved_bytes + self.boundaries.kept_bytes(0, len(self.layers))
        for index, block in enumerate(self.classes):
            names = [*block.recompute, f"groups of {self.longest_chains[index]}"] if block.recompute else []
            least = min([block.saved_bytes, *(block.recomputed(choice(name)).saved_bytes for name in names)])
            kept += least * self.layers.count(index)
        return kept

    @cached_property
    def choices(self) -> tuple[tuple[str, ...], ...]:
        """[class]: what may be recomputed of its layers; groups of those that follow each other."""
        return tuple(
            (*block.recompute, *(f"groups of {k}" for k in _GROUPS if k <= self.longest_chains[i]))
            for i, block in enumerate(self.classes)
        )

    @cached_property
    def longest_chains(self) -> tuple[int, ...]:
        """[class]: how many layers of it follow each other at most, where they all do; else 1."""
        chains = self.model.chains or tuple(range(len(self.layers)))
        longest = []
        for index in range(len(self.classes)):
            own = {chain for chain, c in zip(chains, self.layers, strict=True) if c == index}
            longest.append(self.layers.count(index) if len(own) == 1 else 1)
        return tuple(longest)

    @cached_property
    def parameters(self) -> int:
        """Elements of one tp rank over all stages, tied ones once."""
        ends = self.prologue.parameters + self.epilogue.parameters
        return ends + sum(self.classes[c].parameters for c in self.layers)


@dataclass(frozen=True)
class StageShape:
    """What a stage is made of: layers of each class, of these how many with each recompute, ends of the model.

    receives_bytes: of a micro-batch, from both neighbours. held: what it keeps of one beside what its blocks do, as
    they are and with its first layer, one of `starts_with`, recomputed as a whole.
    """

    counts: tuple[int, ...]
    recomputed: tuple[tuple[tuple[str, int], ...], ...]
    first: bool
    last: bool
    receives_bytes: float
    kept: tuple[float, float]
    starts_with: int

    @property
    def kept_bytes(self) -> float:
        """Of `held` what holds; which layers of a class are recomputed the shape does not say, so all must be."""
        chosen = self.recomputed[self.starts_with] if self.recomputed else ()
        return self.kept[0 < sum(n for what, n in chosen if is_whole(what)) == self.counts[self.starts_with]]


@dataclass(frozen=True)
class StageTime:
    """One micro-batch through a stage. `again`: by choice, the parts of the forward that backward repeats. `later`:
    the part of backward that the schedule runs apart from the rest."""

    forward: PhaseTime
    backward: PhaseTime
    repeated: Mapping[str, PhaseTime]
    later: PhaseTime = PhaseTime()

    @property
    def recompute(self) -> PhaseTime:
        return sum(self.repeated.values(), PhaseTime())

    @property
    def total_s(self) -> float:
        return self.forward.total_s + self.backward.total_s + self.recompute.total_s


def price_model(
    model: ModelCosts, micro_batches: Sequence[int], sequence: int, hardware: Hardware, precision: str
) -> list[ModelPrice]:
    """The model at each micro-batch size."""
    mesh = Mesh(cp=model.cp, tp=model.tp)
    groups = {axis: axis_group(mesh, axis, hardware.gpus_per_node) for axis in ("cp", "tp")}
    tokens = sequence // model.cp
    names = list(model.classes)
    blocks = [model.prologue, *model.classes.values(), model.epilogue]
    prices = [price_block(block, micro_batches, tokens, hardware, precision, groups) for block in blocks]
    layers = tuple(names.index(name) for name in model.layers)
    boundaries = boundary_evaluator(model.boundary_values, model.constants, len(layers))
    made = []
    for b, at in zip(micro_batches, zip(*prices, strict=True), strict=True):
        flops = float(model.unsharded_flops.subs({B: b, S: tokens}))
        chunked = _in_chunks(model, at[-1], (b, tokens), hardware, precision, groups)
        made.append(
            ModelPrice(
                model, b, at[0], tuple(at[1:-1]), layers, at[-1], flops, boundaries(b, tokens), epilogue_in=chunked
            )
        )
    return made


def _in_chunks(
    model: ModelCosts,
    whole: BlockPrice,
    sizes: tuple[int, int],
    hardware: Hardware,
    precision: str,
    groups: Mapping[str, Group],
) -> Callable[[int], BlockPrice] | None:
    """The price of the epilogue by the number of slices of the vocabulary; `sizes`: samples, tokens of a rank."""
    if (layer := model.chunked) is None:
        return None

    def at(chunks: int) -> BlockPrice:
        if chunks == 1:
            return whole
        return price_values(layer, block_evaluator(layer)(*sizes, chunks), hardware, precision, groups)

    return at


def stage_shape(price: ModelPrice, start: int, stop: int, recompute: Iterable[RecomputeChoice] = ()) -> StageShape:
    """The stage of layers [start, stop); the ends of the model belong to the first and last layer."""
    recomputed: list[dict[str, int]] = [{} for _ in price.classes]
    for layer, what in by_layer(recompute).items():
        if start <= layer < stop:
            own = recomputed[price.layers[layer]]
            own[what] = own.get(what, 0) + 1
    return StageShape(
        tuple(b - a for a, b in zip(price.counts_until[start], price.counts_until[stop], strict=True)),
        tuple(tuple(sorted(own.items())) for own in recomputed),
        start == 0,
        stop == len(price.layers),
        price.boundaries.receives_bytes(start, stop),
        (price.boundaries.kept_bytes(start, stop), price.boundaries.kept_bytes(start, stop, whole_first_layer=True)),
        price.layers[start] if start < stop else 0,
    )


def stage_blocks(
    price: ModelPrice, shape: StageShape
) -> list[tuple[BlockPrice, int, list[tuple[RecomputePrice, int]]]]:
    """(block, copies, [(choice, copies recomputed so)]), in forward order up to the mixing of classes."""
    blocks: list[tuple[BlockPrice, int, list[tuple[RecomputePrice, int]]]] = []
    if shape.first:
        blocks.append((price.prologue, 1, []))
    for block, count, chosen in zip(price.classes, shape.counts, shape.recomputed, strict=True):
        if count:
            blocks.append((block, count, [(block.recomputed(what), n) for what, n in chosen]))
    return [*blocks, (price.epilogue, 1, [])] if shape.last else blocks


def stage_time(price: ModelPrice, shape: StageShape, splits_backward: bool = False) -> StageTime:
    """Seconds of one micro-batch. in_halves: the gradients of weights come later; on the first stage, all do."""
    forward = backward = later = PhaseTime()
    repeated: dict[str, PhaseTime] = {}
    for block, count, _ in stage_blocks(price, shape):
        forward += block.forward * count
        if splits_backward and not shape.first:
            later += block.dgrad_wgrad[1] * count
            backward += (block.dgrad_wgrad[0] + block.dgrad_wgrad[1]) * count
        else:
            backward += block.backward * count
    for block, chosen in zip(price.classes, shape.recomputed, strict=True):
        for what, n in chosen:
            repeated[what] = repeated.get(what, PhaseTime()) + block.recomputed(what).time * n
    return StageTime(forward, backward, repeated, backward if splits_backward and shape.first else later)
