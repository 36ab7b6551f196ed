"""The values that pass between the blocks of a program: what nothing reads goes; layers that pass on only theirs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypeVar

from .graph import TABLES, Block, Call, Program, Role, info, update_info

Value = TypeVar("Value")


def drop_unread(program: Program) -> Program:
    """The program without values that their readers do not use, and without the ops that only these need."""
    while (smaller := _unread_results(_unread_inputs(program))) is not program:
        program = smaller
    return program


def _unread_inputs(program: Program) -> Program:
    """Calls pass only what their blocks read."""
    blocks, calls = dict(program.blocks), program.calls
    for name, block in program.blocks.items():
        block = _without_dead_code(block.copy())
        unread = {int(info(n).ref): n for n in block.placeholders(Role.VALUE) if not n.users}
        if not unread:
            continue
        for node in unread.values():
            block.graph.erase_node(node)
        for node in block.placeholders(Role.VALUE):
            place = int(info(node).ref)
            update_info(node, ref=str(place - sum(other < place for other in unread)))
        blocks[name] = block
        calls = tuple(replace(c, inputs=_without(c.inputs, unread)) if c.block == name else c for c in calls)
    return program if calls == program.calls else replace(program, blocks=blocks, calls=calls)


def _unread_results(program: Program) -> Program:
    """Blocks give only what some call reads; tables without results go."""
    read = {value for call in program.calls for value in call.inputs}
    blocks, calls = dict(program.blocks), program.calls
    for name, block in program.blocks.items():
        outputs = filter(None, (call.outputs for call in calls if call.block == name))
        unread = {i for i, values in enumerate(zip(*outputs, strict=True)) if read.isdisjoint(values)}
        if not unread:
            continue
        blocks[name] = block = block.copy()
        block.output.args = (_without(block.results, unread),)
        _without_dead_code(block)
        calls = tuple(replace(c, outputs=_without(c.outputs, unread)) if c.block == name else c for c in calls)
    return program if calls == program.calls else _without_empty_tables(replace(program, blocks=blocks, calls=calls))


def _without_empty_tables(program: Program) -> Program:
    if TABLES not in program.blocks or program.blocks[TABLES].results:
        return program
    blocks = {name: block for name, block in program.blocks.items() if name != TABLES}
    return replace(program, blocks=blocks, calls=tuple(call for call in program.calls if call.block != TABLES))


def _without_dead_code(block: Block) -> Block:
    """In place, without what nothing reads; what is passed by position stays."""
    for node in reversed(block.nodes):
        if not node.users and info(node).role is not Role.VALUE:
            block.graph.erase_node(node)
    return block


def _without(values: Sequence[Value], places: Collection[int]) -> tuple[Value, ...]:
    return tuple(value for place, value in enumerate(values) if place not in places)


def chains(program: Program) -> tuple[int, ...]:
    """The number of each layer's chain: neighbours of one class in one list, the values of each read by the next alone.

    What else they read is the same for all: a loop over them is one line.
    """
    calls = program.layer_calls
    numbers: list[int] = []
    for place, call in enumerate(calls):
        follows = place > 0 and _follows(program, calls[place - 1], call)
        numbers.append(numbers[-1] if follows else numbers[-1] + 1 if numbers else 0)
    return tuple(numbers)


def _follows(program: Program, before: Call, after: Call) -> bool:
    if program.is_between(after.block) or after.block != before.block or _list(after) != _list(before):
        return False
    taken = [(a, b) for a, b in zip(before.inputs, after.inputs, strict=True) if a != b]
    if {b for _, b in taken} != set(before.outputs) or len(taken) != len(before.outputs):
        return False
    last = program.calls.index(after) == program.calls.index(before) + 1
    others = (call for call in program.calls if call is not after)
    return last and not any(value in call.inputs for call in others for value in before.outputs)


def _list(call: Call) -> str:
    return call.path.rpartition(".")[0]
