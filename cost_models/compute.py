"""Time of computing: a roofline per op, summed over a block, at least what the host needs to launch it.

T_op = (T_math^q + T_memory^q)^(1/q)        q = 4, a smooth maximum (COST_MODEL 2.1; no tiles yet)
T_block = max(Σ T_op, launches · t_launch)  the host runs ahead: a floor of blocks, not ops
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate

import sympy

from autopar.cost_models.collectives import Group, axis_group, collective_time_s
from autopar.cost_models.hardware import Hardware
from autopar.cost_models.layer_costs import CHUNKS, B, LayerCosts, ModelCosts, S
from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.recompute import LAYER, Again, by_layer, choice, group_of

_SMOOTHNESS = 4
_LARGEST_GROUP = 8
KINDS = ("matmul", "attention", "memory")
# Kernels an op launches in backward: both gradients of a matmul, one otherwise.
_BACKWARD_LAUNCHES = {"matmul": 2, "attention": 1, "memory": 1}


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of one pass over a block, by cause; they add up to `total_s`."""

    matmul_s: float = 0.0
    attention_s: float = 0.0
    memory_s: float = 0.0
    launch_s: float = 0.0  # what the host floor adds to the three above
    tp_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.matmul_s + self.attention_s + self.memory_s + self.launch_s + self.tp_s

    def __add__(self, other: PhaseTime) -> PhaseTime:
        return PhaseTime(
            self.matmul_s + other.matmul_s,
            self.attention_s + other.attention_s,
            self.memory_s + other.memory_s,
            self.launch_s + other.launch_s,
            self.tp_s + other.tp_s,
        )

    def __mul__(self, factor: float) -> PhaseTime:
        return PhaseTime(
            factor * self.matmul_s,
            factor * self.attention_s,
            factor * self.memory_s,
            factor * self.launch_s,
            factor * self.tp_s,
        )


@dataclass(frozen=True)
class AgainPrice:
    """A choice of what backward computes again, per layer: bytes kept instead, seconds of what runs again.

    live_bytes: what backward holds again at once, of all the layers of a group.
    """

    saved_bytes: float
    time: PhaseTime
    live_bytes: float
    group: int = 1


@dataclass(frozen=True)
class BlockPrice:
    """A block with numbers: seconds and bytes of one micro-batch on one rank, recompute excluded."""

    name: str
    forward: PhaseTime
    backward: PhaseTime
    sync_s: float  # tp reductions of gradients, once a gradient synchronisation
    parameters: int
    tied_parameters: int
    saved_bytes: float
    working_bytes: float
    output_bytes: float
    buffer_bytes: int = 0
    data: tuple[tuple[str, float], ...] = ()  # (collective, bytes) over dp within forward and backward
    logits_bytes: float = 0.0  # of saved_bytes
    logits_peak_bytes: float = 0.0  # the most at once of one micro-batch, saved_bytes included
    again: Mapping[str, AgainPrice] = field(default_factory=dict)

    @property
    def work_s(self) -> float:
        return self.forward.total_s + self.backward.total_s

    def recomputed(self, what: str) -> AgainPrice:
        """The price of a choice; in a group all layers but the last run to their end."""
        if (size := group_of(what)) == 1:
            if what not in self.again:
                raise PlanError(f"recompute: {self.name} has no {what}: it has {', '.join(map(repr, self.again))}")
            return self.again[what]
        one = self.again[LAYER]
        time = (self.forward * (size - 1) + one.time) * (1 / size)
        return AgainPrice(one.saved_bytes / size, time, size * one.live_bytes, size)


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
        kept = self.prologue.saved_bytes + self.epilogue.saved_bytes
        for index, block in enumerate(self.classes):
            names = [*block.again, f"groups of {self.longest_chains[index]}"] if block.again else []
            least = min([block.saved_bytes, *(block.recomputed(choice(name)).saved_bytes for name in names)])
            kept += least * self.layers.count(index)
        return kept

    @cached_property
    def choices(self) -> tuple[tuple[str, ...], ...]:
        """[class]: what may be recomputed of its layers; groups of up to 8 of those that follow each other."""
        return tuple(
            (*block.again, *(f"groups of {k}" for k in range(2, min(self.longest_chains[i], _LARGEST_GROUP) + 1)))
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
    """What a stage is made of: layers of each class, of these how many with each recompute, ends of the model."""

    counts: tuple[int, ...]
    recomputed: tuple[tuple[tuple[str, int], ...], ...]
    first: bool
    last: bool


@dataclass(frozen=True)
class StageTime:
    """One micro-batch through a stage. `again`: by choice, the parts of the forward that backward repeats."""

    forward: PhaseTime
    backward: PhaseTime
    again: Mapping[str, PhaseTime]

    @property
    def recompute(self) -> PhaseTime:
        return sum(self.again.values(), PhaseTime())

    @property
    def total_s(self) -> float:
        return self.forward.total_s + self.backward.total_s + self.recompute.total_s


def price_model(
    model: ModelCosts, micro_batches: Sequence[int], sequence: int, hardware: Hardware, precision: str
) -> list[ModelPrice]:
    """The model at each micro-batch size."""
    tp = axis_group(Mesh(tp=model.tp), "tp", hardware.gpus_per_node)
    names = list(model.classes)
    blocks = [model.prologue, *model.classes.values(), model.epilogue]
    prices = [price_block(block, micro_batches, sequence, hardware, precision, tp) for block in blocks]
    layers = tuple(names.index(name) for name in model.layers)
    made = []
    for b, at in zip(micro_batches, zip(*prices, strict=True), strict=True):
        flops = float(model.unsharded_flops.subs({B: b, S: sequence}))
        chunked = _in_chunks(model, at[-1], b, sequence, hardware, precision, tp)
        made.append(ModelPrice(model, b, at[0], tuple(at[1:-1]), layers, at[-1], flops, epilogue_in=chunked))
    return made


def _in_chunks(
    model: ModelCosts, whole: BlockPrice, b: int, sequence: int, hardware: Hardware, precision: str, tp: Group
) -> Callable[[int], BlockPrice] | None:
    """The price of the epilogue by the number of slices of the vocabulary."""
    if (layer := model.chunked) is None:
        return None

    def at(chunks: int) -> BlockPrice:
        if chunks == 1:
            return whole
        return _price(layer, _evaluator(layer)(b, sequence, chunks), hardware, precision, tp)

    return at


def stage_shape(price: ModelPrice, start: int, stop: int, recompute: Iterable[Again] = ()) -> StageShape:
    """The stage of layers [start, stop); the ends of the model belong to the first and last layer."""
    counts = [0] * len(price.classes)
    recomputed: list[dict[str, int]] = [{} for _ in price.classes]
    chosen = by_layer(recompute)
    for layer in range(start, stop):
        counts[price.layers[layer]] += 1
        if what := chosen.get(layer):
            own = recomputed[price.layers[layer]]
            own[what] = own.get(what, 0) + 1
    again = tuple(tuple(sorted(own.items())) for own in recomputed)
    return StageShape(tuple(counts), again, start == 0, stop == len(price.layers))


def stage_blocks(price: ModelPrice, shape: StageShape) -> list[tuple[BlockPrice, int, list[tuple[AgainPrice, int]]]]:
    """(block, copies, [(choice, copies recomputed so)]), in forward order up to the mixing of classes."""
    blocks: list[tuple[BlockPrice, int, list[tuple[AgainPrice, int]]]] = []
    if shape.first:
        blocks.append((price.prologue, 1, []))
    for block, count, chosen in zip(price.classes, shape.counts, shape.recomputed, strict=True):
        if count:
            blocks.append((block, count, [(block.recomputed(what), n) for what, n in chosen]))
    return [*blocks, (price.epilogue, 1, [])] if shape.last else blocks


def stage_time(price: ModelPrice, shape: StageShape) -> StageTime:
    """Seconds of one micro-batch."""
    forward = backward = PhaseTime()
    again: dict[str, PhaseTime] = {}
    for block, count, _ in stage_blocks(price, shape):
        forward += block.forward * count
        backward += block.backward * count
    for block, chosen in zip(price.classes, shape.recomputed, strict=True):
        for what, n in chosen:
            again[what] = again.get(what, PhaseTime()) + block.recomputed(what).time * n
    return StageTime(forward, backward, again)


def op_time_s(kind: str, flops: float, size_bytes: float, hardware: Hardware, precision: str) -> float:
    """Seconds of one op on an idle device; `kind` picks the achieved share of peak."""
    efficiency = hardware.attention_efficiency if kind == "attention" else hardware.matmul_efficiency
    math_s = flops / (hardware.peak(precision) * efficiency) if kind != "memory" else 0.0
    memory_s = size_bytes / (hardware.memory_bytes_per_s * hardware.memory_efficiency)
    largest = max(math_s, memory_s)
    if largest == 0.0:
        return 0.0
    return float(largest * (1 + (min(math_s, memory_s) / largest) ** _SMOOTHNESS) ** (1 / _SMOOTHNESS))


def price_block(
    layer: LayerCosts,
    micro_batches: Sequence[int],
    sequence: int,
    hardware: Hardware,
    precision: str,
    tp: Group,
) -> list[BlockPrice]:
    """The block at each micro-batch size (samples); `sequence` in tokens, `tp` its collectives' group."""
    evaluate = _evaluator(layer)
    return [_price(layer, evaluate(b, sequence, 1), hardware, precision, tp) for b in micro_batches]


@lru_cache(maxsize=256)
def _evaluator(layer: LayerCosts) -> Callable[[int, int, int], list[float]]:
    """All expressions of a block as one compiled function of (b, s, chunks); equal ones are computed once."""
    expressions: list[sympy.Expr] = []
    for op in layer.ops:
        expressions += [op.forward_flops, op.forward_bytes, op.backward_flops, op.backward_bytes]
        expressions += op.launches or (1, _BACKWARD_LAUNCHES[op.kind])
    expressions += [transfer.size_bytes for transfer in (*layer.transfers, *layer.data_transfers)]
    expressions += [size for again in layer.again for size in (again.saved_bytes, again.live_bytes)]
    expressions += [layer.saved_bytes, layer.working_bytes, layer.output_bytes]
    expressions += [layer.logits_bytes, layer.logits_peak_bytes]
    expressions = [sympy.sympify(expression) for expression in expressions]
    unique = list(dict.fromkeys(expressions))
    place = {expression: index for index, expression in enumerate(unique)}
    order = [place[expression] for expression in expressions]
    function = sympy.lambdify((B, S, CHUNKS), unique, modules="math")

    def evaluate(b: int, s: int, chunks: int) -> list[float]:
        values = function(b, s, chunks)
        return [float(values[index]) for index in order]

    return evaluate


def _price(layer: LayerCosts, values: list[float], hardware: Hardware, precision: str, tp: Group) -> BlockPrice:
    backward = dict.fromkeys(KINDS, 0.0)
    backward_launches = 0.0
    ops: list[tuple[float, float]] = []
    for index, op in enumerate(layer.ops):
        f_flops, f_bytes, b_flops, b_bytes, f_launches, b_launches = values[6 * index : 6 * index + 6]
        ops.append((op_time_s(op.kind, f_flops, f_bytes, hardware, precision), f_launches))
        backward[op.kind] += op_time_s(op.kind, b_flops, b_bytes, hardware, precision)
        backward_launches += b_launches if b_flops or b_bytes else 0
    at = 6 * len(layer.ops)
    comm = dict.fromkeys(("forward", "backward", "sync"), 0.0)
    comm_s: list[float] = []
    for transfer, size_bytes in zip(layer.transfers, values[at:], strict=False):
        comm_s.append(collective_time_s(transfer.collective, size_bytes, tp, hardware))
        comm[transfer.phase] += comm_s[-1]
    over_dp = zip(layer.data_transfers, values[at + len(layer.transfers) :], strict=False)
    saved, working, output, logits, logits_peak = values[-5:]
    kept = values[-5 - 2 * len(layer.again) : -5]
    again = {
        part.what: AgainPrice(
            kept[2 * i],
            _forward(layer, ops, part.ops, sum(comm_s[t] for t in part.transfers), hardware),
            kept[2 * i + 1],
        )
        for i, part in enumerate(layer.again)
    }
    return BlockPrice(
        name=layer.name,
        forward=_forward(layer, ops, range(len(ops)), comm["forward"], hardware),
        backward=_phase(backward, backward_launches, comm["backward"], hardware),
        sync_s=comm["sync"],
        parameters=layer.parameters,
        tied_parameters=layer.tied_parameters,
        saved_bytes=saved,
        working_bytes=working,
        output_bytes=output,
        buffer_bytes=layer.buffer_bytes,
        data=tuple((transfer.collective, size_bytes) for transfer, size_bytes in over_dp),
        logits_bytes=logits,
        logits_peak_bytes=logits_peak,
        again=again,
    )


def _forward(
    layer: LayerCosts, ops: Sequence[tuple[float, float]], places: Sequence[int], tp_s: float, hardware: Hardware
) -> PhaseTime:
    """Seconds of some of the block's ops, by kind; ops: (seconds, launches) of each."""
    seconds = dict.fromkeys(KINDS, 0.0)
    for place in places:
        seconds[layer.ops[place].kind] += ops[place][0]
    return _phase(seconds, sum(ops[place][1] for place in places), tp_s, hardware)


def _phase(seconds: dict[str, float], launches: float, tp_s: float, hardware: Hardware) -> PhaseTime:
    device_s = sum(seconds.values())
    floor_s = max(0.0, launches * hardware.launch_s - device_s)
    return PhaseTime(seconds["matmul"], seconds["attention"], seconds["memory"], floor_s, tp_s)
