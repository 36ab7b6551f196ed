"""The type check: a program's placements against the rules, so that a wrong or missing collective is an error.

Run after every pass, with the checks of the level that the pass leaves and of those below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

from torch import fx

from ..errors import TypeCheckError
from ..ir.graph import Block, Program, Role, info, node_inputs
from ..ir.ops import COLLECTIVES, convert, is_collective
from ..placement import PARTIAL, REPLICATE, Placement, conversion
from . import Axis, rule_of, strategies
from .data_axis import check_data_axis, ends
from .where import error


class Level(IntEnum):
    """What is true of a program."""

    TRACED = 0  # every node has facts, and reads what is given before it
    TYPED = 1  # every node has a strategy of its rule, every parameter and input a placement that it may have
    CONVERTED = 2  # every operand has the placement that its reader's strategy wants
    SPREAD = 3  # the same over the replicas: what they reduce is reduced
    LOWERED = 4  # every conversion is a collective


def verify(program: Program, level: Level, axis: Axis | None = None, replicas: int = 1) -> None:
    """The checks of a level and of those below it, over `axis` (none before there is one) and so many replicas.

    TypeCheckError naming block, node, user's line and placements.
    """
    _check_given(program)
    if axis is None or level < Level.TYPED:
        return
    for block in program.blocks.values():
        if not program.count(block.name):
            continue
        for node in block.placeholders():
            _check_placeholder(program, block, node)
        for node in block.ops:
            _check_node(block, node, axis, level)
        if level >= Level.CONVERTED:
            _check_results(program, block, axis)
    if level >= Level.SPREAD and replicas > 1:
        check_data_axis(program)


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


def _check_placeholder(program: Program, block: Block, node: fx.Node) -> None:
    """Inputs and buffers are whole; a parameter is whole or a shard, and the same under each of its names."""
    facts = info(node)
    if facts.strategy is None:
        raise error(block, node, "has no placement")
    if facts.role in (Role.INPUT, Role.BUFFER) and facts.placement != REPLICATE:
        raise error(block, node, f"an {facts.role.value} is whole on every rank, not {facts.placement}")
    if facts.role is not Role.PARAMETER:
        return
    if facts.placement == PARTIAL:
        raise error(block, node, "a parameter is whole or a shard, not Partial")
    name = program.call_of(block.name).full_name(facts.ref)
    if name in program.tied:
        for other_block, other in _uses(program, program.tied[name]):
            if info(other).placement != facts.placement:
                raise error(
                    block,
                    node,
                    f"is tied to {other_block}.{other.name}, {info(other).placement}, but is {facts.placement}",
                )


def _uses(program: Program, name: str) -> Iterator[tuple[str, fx.Node]]:
    """(block, placeholder) of each use of a parameter."""
    for call in program.calls:
        for node in program.blocks[call.block].placeholders(Role.PARAMETER):
            if call.full_name(info(node).ref) == name:
                yield call.block, node


def _check_node(block: Block, node: fx.Node, axis: Axis, level: Level) -> None:
    facts = info(node)
    if facts.strategy is None:
        raise error(block, node, "has no placement")
    if level >= Level.LOWERED and node.target is convert:
        raise error(block, node, "is a conversion still, and no collective")
    operands = tuple(info(n).placement for n in node_inputs(node))
    if facts.role is Role.CONVERT and ends(node)[2] != axis.name:
        if operands != facts.strategy.inputs or operands != (facts.strategy.output,):
            raise error(block, node, f"is no conversion over {axis.name}, but {operands[0]} becomes {facts.placement}")
        return
    if facts.role is Role.CONVERT:
        _check_conversion(block, node, operands[0], axis)
        return
    legal = strategies(node, rule_of(node), axis) if axis.size > 1 else [facts.strategy]
    if facts.strategy not in legal:
        shown = "; ".join(map(str, legal))
        raise error(
            block, node, f"{facts.strategy} is no strategy of its rule on {axis.name}={axis.size}: use one of {shown}"
        )
    if level >= Level.CONVERTED and operands != facts.strategy.inputs:
        given = ", ".join(map(str, operands))
        raise error(block, node, f"wants ({facts.strategy}) but reads ({given}): a conversion is missing")


def _check_conversion(block: Block, node: fx.Node, source: Placement, axis: Axis) -> None:
    strategy = info(node).strategy
    assert strategy is not None
    found = conversion(source, strategy.output)
    if strategy.inputs != (source,) or found is None:
        raise error(block, node, f"converts {strategy} but reads {source}")
    for placement in (source, strategy.output):
        size = info(node).shape[placement.dim] if placement.is_shard else 0
        if size and not axis.even(size):
            raise error(
                block, node, f"converts along {placement}, where {size} is not divisible by {axis.name}={axis.size}"
            )
    if is_collective(node.target):
        dims = tuple(p.dim for p in (source, strategy.output) if p.is_shard)
        if node.target is not COLLECTIVES[found.function] or node.args[1:] != dims:
            raise error(block, node, f"{strategy} is {found.function}{dims}, not {node.target.__name__}")  # type: ignore[union-attr]
    elif node.target is not convert:
        raise error(block, node, "is no conversion")


def _check_results(program: Program, block: Block, axis: Axis) -> None:
    for call in program.calls:
        if call.block != block.name:
            continue
        if not call.outputs:
            for result in block.results:
                if info(result).placement != axis.loss:
                    raise error(block, result, f"the loss leaves as {info(result).placement}, not as {axis.loss}")
            continue
        for value, result in zip(call.outputs, block.results, strict=True):
            for reader in (c for c in program.calls if value in c.inputs):
                place = str(reader.inputs.index(value))
                for node in program.blocks[reader.block].placeholders(Role.VALUE):
                    if info(node).ref == place and info(node).placement != info(result).placement:
                        raise error(
                            block,
                            result,
                            f"leaves as {info(result).placement} but {reader.block} takes {info(node).placement}",
                        )
