"""What passes between layers: each value's bytes, the layer that makes it and the last one that reads it.

A pipeline boundary is crossed by all that is made before it and read after it, for the stages between send on what
is read later (passes/split_stages.py). The ends of the model belong to its first and last layer, as on a stage.
Tables pass no boundary: each stage makes those that its layers read, and keeps them of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import sympy
from torch import fx

from autopar.cost_models.layer_costs import B, BoundaryValue, S, StageConstant
from autopar.ir.build import is_continuous
from autopar.ir.graph import EPILOGUE, PROLOGUE, TABLES, Block, Call, Program, Role, info
from autopar.liveness.saved import Saved, local_bytes, storage
from autopar.placement import Strategy

Strategies = Mapping[str, Mapping[str, Strategy]]


def once_per_stage(program: Program) -> dict[str, frozenset[str]]:
    """[block]: nodes whose storage passes to several layers, or to one that does not follow: a stage keeps it once.

    What passes elsewhere by the same input or result of a block is taken with it.
    """
    uses = _uses(program)
    found: set[fx.Node] = set()
    before = -1
    while len(found) > before:
        before = len(found)
        for use in uses:
            if use.goes_far or not found.isdisjoint(use.nodes):
                found |= use.nodes
    return {name: frozenset(n.name for n in found if n.graph is b.graph) for name, b in program.blocks.items()}


def boundary_values(program: Program, strategies: Strategies, tp: int) -> tuple[BoundaryValue, ...]:
    """Every value that passes between layers, in the placement in which it is read."""
    by_themselves, found = once_per_stage(program), list[BoundaryValue]()
    for use in _uses(program):
        block, node = use.reader
        size = local_bytes(info(node), strategies[block.name][node.name].output, tp)
        found.append(
            BoundaryValue(
                made=use.made,
                read=use.read,
                size_bytes=size,
                gradient_bytes=size if is_continuous(info(node).dtype) else sympy.Integer(0),
                once_per_stage=node.name in by_themselves[block.name] or not info(node).requires_grad,
                kept=Saved(block, strategies[block.name], tp).keeps_storage(node),
            )
        )
    return tuple(found)


def constants(program: Program, strategies: Strategies, tp: int) -> tuple[StageConstant, ...]:
    """What layers read of the tables, each storage once, with the layers that read it. No buffer, no input is one."""
    if not program.count(TABLES):
        return ()
    readers, block = _readers(program), program.blocks[TABLES]
    layers: dict[fx.Node, set[int]] = {}
    for value, result in zip(program.call_of(TABLES).outputs, block.results, strict=True):
        if info(root := storage(result)).role is Role.OP:
            layers.setdefault(root, set()).update(layer for _, layer in readers.get(value, ()))
    placed = strategies[TABLES]
    return tuple(
        StageConstant(tuple(sorted(read)), local_bytes(info(root), placed[root.name].output, tp))
        for root, read in layers.items()
        if read
    )


@dataclass(frozen=True)
class _Use:
    """A value made by one layer and read by others; its nodes: the storage where it is made, the inputs that it is."""

    made: int
    read: int
    readers: int
    nodes: frozenset[fx.Node]
    reader: tuple[Block, fx.Node]  # the first

    @property
    def goes_far(self) -> bool:
        return self.readers > 1 or self.read > self.made + 1


def _uses(program: Program) -> list[_Use]:
    """All values but the tables, which every stage makes for itself."""
    readers = _readers(program)
    return [
        _use(program, call, layer, place, readers[value])
        for call, layer in _layer_of(program).items()
        for place, value in enumerate(call.outputs)
        if value in readers
    ]


def _layer_of(program: Program) -> dict[Call, int]:
    """The layer of each call but that of the tables; the ends of the model belong to the first and the last one."""
    layers = {call: layer for layer, call in enumerate(program.layer_calls)}
    ends = {PROLOGUE: 0, EPILOGUE: max(0, len(layers) - 1)}
    calls = [call for call in program.calls if call.block != TABLES]
    return {call: ends[call.block] if call.block in ends else layers[call] for call in calls}


def _readers(program: Program) -> dict[str, list[tuple[Call, int]]]:
    """[value]: the calls that read it, each with its layer."""
    readers: dict[str, list[tuple[Call, int]]] = {}
    for call, layer in _layer_of(program).items():
        for value in dict.fromkeys(call.inputs):
            readers.setdefault(value, []).append((call, layer))
    return readers


def _use(program: Program, maker: Call, made: int, place: int, readers: Sequence[tuple[Call, int]]) -> _Use:
    value = maker.outputs[place]
    inputs = [(block := program.blocks[call.block], _input(block, call.inputs.index(value))) for call, _ in readers]
    nodes = {storage(program.blocks[maker.block].results[place]), *(node for _, node in inputs)}
    return _Use(made, max(layer for _, layer in readers), len(readers), frozenset(nodes), inputs[0])


def _input(block: Block, place: int) -> fx.Node:
    return next(n for n in block.placeholders(Role.VALUE) if info(n).ref == str(place))


# --------------------------------------------------------------------------------
# With numbers


@dataclass(frozen=True)
class Boundaries:
    """Bytes of a micro-batch on one rank, by the number of layers before a boundary.

    values: sent on across it; gradients: sent back. made: of what a stage keeps once, what is made before it. sent: of
    the rest, what crosses it; received: of that, what the layer after it counts, though it lies in the buffer in which
    it was received. tables: by the layers that read them.
    """

    values_bytes: Sequence[float]
    gradients_bytes: Sequence[float]
    made_bytes: Sequence[float]
    sent_bytes: Sequence[float]
    received_bytes: Sequence[float]
    constants: Mapping[tuple[int, ...], float]

    def receives_bytes(self, start: int, stop: int) -> float:
        """Of a micro-batch, what the stage of layers [start, stop) receives from the stages before and after it."""
        return self.values_bytes[start] + self.gradients_bytes[stop]

    def kept_bytes(self, start: int, stop: int, whole_first_layer: bool = False) -> float:
        """Of a micro-batch, what that stage keeps from forward to backward beside what its layers count.

        whole_first_layer: its first layer is recomputed as a whole, and so counts all that it reads.
        """
        made = self.made_bytes[stop] - self.made_bytes[start]
        made += sum(size for readers, size in self.constants.items() if any(start <= at < stop for at in readers))
        return made + self.sent_bytes[stop] - (self.sent_bytes if whole_first_layer else self.received_bytes)[start]


@lru_cache(maxsize=256)
def boundary_evaluator(
    values: tuple[BoundaryValue, ...], stage_constants: tuple[StageConstant, ...], layers: int
) -> Callable[[int, int], Boundaries]:
    """The boundaries of a model as a function of (b, s); equal sizes are computed once."""
    sizes = [size for value in values for size in (value.size_bytes, value.gradient_bytes)]
    sizes += [table.size_bytes for table in stage_constants]
    unique = list(dict.fromkeys(map(sympy.sympify, sizes)))
    place = {size: index for index, size in enumerate(unique)}
    function = sympy.lambdify((B, S), unique, modules="math")

    def evaluate(b: int, s: int) -> Boundaries:
        numbers = [float(number) for number in function(b, s)]
        across, back, made, sent, received = ([0.0] * (layers + 2) for _ in range(5))
        for value in values:
            size, gradient = (numbers[place[sympy.sympify(n)]] for n in (value.size_bytes, value.gradient_bytes))
            for line, amount in ((across, size), (back, gradient)):  # differences, summed below
                line[value.made + 1] += amount
                line[value.read + 1] -= amount
            if value.once_per_stage:
                made[value.made + 1] += size
            elif value.read > value.made:
                sent[value.read] += size
                received[value.read] += size if value.kept else 0.0
        across, back, made = (list(accumulate(line)) for line in (across, back, made))
        by_readers: dict[tuple[int, ...], float] = {}
        for table in stage_constants:
            size = numbers[place[sympy.sympify(table.size_bytes)]]
            by_readers[table.readers] = by_readers.get(table.readers, 0.0) + size
        return Boundaries(across, back, made, sent, received, by_readers)

    return evaluate
