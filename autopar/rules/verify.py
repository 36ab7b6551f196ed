"""The type check: a program's placements against the rules, so that a wrong or missing collective is an error.

Run after every pass, with the checks of the level that the pass leaves and of those below it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum

from torch import fx

from ..errors import TypeCheckError
from ..ir.graph import Block, Program, Role, info, node_inputs
from ..ir.ops import COLLECTIVES, convert, is_collective
from ..placement import CONVERSIONS, PARTIAL, Kind, Placement, Strategy, conversion
from . import Axis, rule_of, strategies
from .where import error


class Level(IntEnum):
    """What is true of a program."""

    TRACED = 0  # every node has facts, and reads what is given before it
    TYPED = 1  # every node has a strategy of its rule, every parameter and input a placement that it may have
    CONVERTED = 2  # every operand has the placement that its reader's strategy wants
    SPREAD = 3  # the same over the replicas: what they reduce is reduced
    LOWERED = 4  # every conversion is a collective


# Axis → the levels from which on a program is typed there, and has its conversions.
LEVELS: Mapping[str, tuple[Level, Level]] = {
    "tp": (Level.TYPED, Level.CONVERTED),
    "cp": (Level.TYPED, Level.CONVERTED),
    "dp": (Level.SPREAD, Level.SPREAD),
}


def verify(program: Program, level: Level, axes: Sequence[Axis] = ()) -> None:
    """The checks of a level and of those below it, on each of these axes (none before there are any).

    TypeCheckError naming block, node, user's line and placements.
    """
    _check_given(program)
    for axis in axes:
        typed, converted = LEVELS[axis.name]
        for block in program.blocks.values() if level >= typed else ():
            if program.count(block.name):
                _check_block(program, block, axis, level >= converted, level >= Level.LOWERED)


def _check_block(program: Program, block: Block, axis: Axis, converted: bool, lowered: bool) -> None:
    for node in block.placeholders():
        _check_placeholder(program, block, node, axis)
    for node in block.ops:
        strategy = _strategy(block, node, axis)
        if lowered and node.target is convert:
            raise error(block, node, "is a conversion still, and no collective")
        if info(node).role is Role.CONVERT:
            _check_conversion(block, node, strategy, axis)
        else:
            _check_strategy(block, node, strategy, axis)
        operands = tuple(_strategy(block, n, axis).output for n in node_inputs(node))
        if converted and operands != strategy.inputs:
            given = ", ".join(map(str, operands))
            raise error(block, node, f"wants ({strategy}) but reads ({given}): a conversion is missing")
    if converted:
        _check_results(program, block, axis)


def _check_given(program: Program) -> None:
    """Every node has facts and reads nodes before it; every call reads values of calls before it."""
    for block in program.blocks.values():
        before: set[fx.Node] = set()
        for node in block.graph.nodes:
            if missing := next((n for n in node.all_input_nodes if n not in before), None):
                raise error(block, node, f"reads {missing.name}, which does not come before it")
            if node.op in ("placeholder", "call_function"):
                try:
                    info(node)
                except KeyError:
                    raise TypeCheckError(f"{block.name}.{node.name} has no shape and dtype") from None
            before.add(node)
    given: set[str] = set()
    for call in program.calls if len(program.calls) > 1 else ():  # one alone is given its values from outside
        if unknown := [value for value in call.inputs if value not in given]:
            raise TypeCheckError(
                f"{program.name}: {call.block} reads {', '.join(unknown)}, which no call before it gives"
            )
        given.update(call.outputs)


def _strategy(block: Block, node: fx.Node, axis: Axis) -> Strategy:
    strategies = info(node).strategies
    if axis.name not in strategies:
        raise error(block, node, f"has no placement over {axis.name}")
    return strategies[axis.name]


def _check_placeholder(program: Program, block: Block, node: fx.Node, axis: Axis) -> None:
    """Inputs and buffers lie as the axis has them; a parameter as it may, and the same under each of its names."""
    facts, placement = info(node), _strategy(block, node, axis).output
    if facts.role in (Role.INPUT, Role.BUFFER) and placement != axis.given(facts):
        whole = "is whole on every rank" if axis.given(facts).whole else f"lies as {axis.given(facts)} over {axis.name}"
        raise error(block, node, f"an {facts.role.value} {whole}, not {placement}")
    if facts.role is not Role.PARAMETER:
        return
    if placement == PARTIAL or placement.is_shard and not axis.cuts_parameters:
        or_shard = " or a shard" if axis.cuts_parameters else ""
        raise error(
            block, node, f"a parameter is whole{or_shard}, not {'Partial' if placement == PARTIAL else placement}"
        )
    name = program.call_of(block.name).full_name(facts.ref)
    if name in program.tied:
        for other_block, other in _uses(program, program.tied[name]):
            if (lies := info(other).placement_on(axis.name)) != placement:
                raise error(block, node, f"is tied to {other_block}.{other.name}, {lies}, but is {placement}")


def _uses(program: Program, name: str) -> Iterator[tuple[str, fx.Node]]:
    """(block, placeholder) of each use of a parameter."""
    for call in program.calls:
        for node in program.blocks[call.block].placeholders(Role.PARAMETER):
            if call.full_name(info(node).ref) == name:
                yield call.block, node


def _check_strategy(block: Block, node: fx.Node, strategy: Strategy, axis: Axis) -> None:
    legal = strategies(node, rule_of(node), axis, strategy.inputs) if axis.size > 1 else [strategy]
    if strategy not in legal:
        shown = "; ".join(map(str, legal))
        raise error(
            block, node, f"{strategy} is no strategy of its rule on {axis.name}={axis.size}: use one of {shown}"
        )


def _check_conversion(block: Block, node: fx.Node, strategy: Strategy, axis: Axis) -> None:
    """One over another axis leaves what it reads as it lies; one over this axis is the table's, along even dims."""
    (source,), target = strategy.inputs, strategy.output
    *kinds, over = ends(node)
    if over != axis.name:
        if source != target:
            raise error(block, node, f"is no conversion over {axis.name}, but {source} becomes {target}")
        return
    found = conversion(source, target)
    if found is None or node.target is convert and [source.kind, target.kind] != kinds:
        raise error(block, node, f"converts {' to '.join(kind.value for kind in kinds)} but is typed {strategy}")
    for placement in (source, target):
        size = info(node).shape[placement.dim] if placement.is_shard else 0
        if size and not axis.even(size):
            raise error(
                block, node, f"converts along {placement}, where {size} is not divisible by {axis.name}={axis.size}"
            )
    _check_collective(block, node, strategy, found.function)


def _check_collective(block: Block, node: fx.Node, strategy: Strategy, function: str) -> None:
    """A conversion that is lowered calls the table's function, with the dims along which it cuts and joins."""
    if is_collective(node.target):
        dims = tuple(p.dim for p in (*strategy.inputs, strategy.output) if p.is_shard)
        if node.target is not COLLECTIVES[function] or node.args[1:] != dims:
            raise error(block, node, f"{strategy} is {function}{dims}, not {node.target.__name__}")  # type: ignore[union-attr]
    elif node.target is not convert:
        raise error(block, node, "is no conversion")


def ends(node: fx.Node) -> tuple[Kind, Kind, str]:
    """(kind before, kind after, axis) of a conversion, lowered or not."""
    if node.target is convert:
        source, target, axis = (str(a) for a in node.args[1:4])
        return Placement.parse(source).kind, Placement.parse(target).kind, axis
    kinds = next(k for k, c in CONVERSIONS.items() if COLLECTIVES[c.function] is node.target)
    return *kinds, str(node.kwargs["axis"])


def _check_results(program: Program, block: Block, axis: Axis) -> None:
    for call in program.calls:
        if call.block != block.name:
            continue
        if not call.outputs:
            for result in block.results:
                if (lies := _strategy(block, result, axis).output) != axis.loss:
                    raise error(block, result, f"the loss leaves as {lies}, not as {axis.loss}")
            continue
        for value, result in zip(call.outputs, block.results, strict=True):
            for reader in (c for c in program.calls if value in c.inputs):
                place = str(reader.inputs.index(value))
                for node in program.blocks[reader.block].placeholders(Role.VALUE):
                    leaves, taken = (info(n).placement_on(axis.name) for n in (result, node))
                    if info(node).ref == place and taken != leaves:
                        raise error(block, result, f"leaves as {leaves} but {reader.block} takes {taken}")
