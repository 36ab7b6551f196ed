"""What the values that pass between calls are called in Model.forward, and in the blocks that read them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ..ir.graph import TABLES, Block, Call, Program, Role, info
from .body import Body
from .names import argument_name, value_name
from .roles import Roles


def value_names(program: Program) -> dict[str, str]:
    """Value → its name: `x` for the hidden state that the next call reads last, else what it is in its block.

    They share Model.forward with its arguments, and a layer with its own: none has the name of another that is
    still to be read.
    """
    inputs = {*program.inputs, *map(argument_name, program.inputs)}
    names: dict[str, str] = {}
    tables = [call for call in program.calls if call.block == TABLES]
    others = [call for call in program.calls if call.block != TABLES]
    last = {value: place for place, call in enumerate(others) for value in call.inputs}
    for call in tables:
        for value, base in zip(call.outputs, _names_inside(program, call, names), strict=True):
            names[value] = value_name(base, inputs | set(names.values()))
    lasting = set(names)
    inside: dict[str, list[str]] = {}
    for place, call in enumerate(others):
        live = lasting | {value for value in names if last.get(value, -1) > place}
        taken = inputs | {names[value] for value in live}
        bases = inside.get(call.block) or _names_inside(program, call, names)
        inside[call.block] = bases
        hidden = _hidden_state(program, call, bases, [last.get(value, -1) <= place + 1 for value in call.outputs])
        for i, value in enumerate(call.outputs):
            base = "x" if i == hidden else _lasting_name(program, call, i, bases[i])
            names[value] = value_name(base, taken)
            taken.add(names[value])
    return names


def block_arguments(program: Program, block: Block, names: Mapping[str, str]) -> dict[fx.Node, str]:
    """What a block calls what it reads: the names of values in its first call, and of inputs."""
    call = program.call_of(block.name)
    values = {n: names[call.inputs[int(info(n).ref)]] for n in block.placeholders(Role.VALUE)}
    return {**values, **{n: argument_name(info(n).ref) for n in block.placeholders(Role.INPUT)}}


def _names_inside(program: Program, call: Call, names: Mapping[str, str]) -> list[str]:
    """What the lines of a block call its results, left to themselves."""
    if not call.outputs:
        return []
    block = program.blocks[call.block]
    arguments = block_arguments(program, block, names)
    return Body(block.ops, block.results, Roles(block, {}), lambda node: "p", arguments, 1).write().result_names


def _hidden_state(program: Program, call: Call, bases: list[str], brief: list[bool]) -> int | None:
    """The place of the one result that is the hidden state: it has a gradient and only the next call reads it."""
    results = program.blocks[call.block].results
    possible = [i for i, node in enumerate(results[: len(brief)]) if brief[i] and info(node).requires_grad]
    stream = [i for i in possible if bases[i].partition("_")[0] in ("x", "h")]
    return next(iter(stream or possible), None)


def _lasting_name(program: Program, call: Call, place: int, base: str) -> str:
    """The name of a value that is read later: `skip` for a hidden state, an encoder's result by that name."""
    if base.partition("_")[0] not in ("x", "h"):
        return base
    module = info(program.blocks[call.block].results[place]).module
    return "encoder_out" if "encoder" in f"{call.path}.{module}" and "decoder" not in module else "skip"
