"""Which placeholders of different blocks are one decision: a parameter has one placement, and so has a value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..ir.graph import Program, Role, info

Unit = str  # the key of a decision: "block:node", or of the parameter or value that placeholders share


def shared_units(program: Program, groups: Mapping[str, Unit]) -> dict[tuple[str, str], Unit]:
    """(block, placeholder) → the decision it shares: a parameter's by name, or a value's passed between blocks."""
    shared: dict[tuple[str, str], Unit] = {}
    parameters = _parameter_groups(program)
    for block in program.blocks.values():
        if not program.count(block.name):
            continue
        call = program.call_of(block.name)
        for node in block.placeholders():
            facts = info(node)
            if facts.role is Role.PARAMETER:
                shared[block.name, node.name] = f"parameter:{parameters[call.full_name(facts.ref)]}"
            elif facts.role is Role.VALUE:
                shared[block.name, node.name] = groups[call.inputs[int(facts.ref)]]
    return shared


def value_groups(program: Program) -> dict[str, Unit]:
    """Value name → its group: values that meet at one placeholder, or leave one result, share a placement."""
    meeting: dict[tuple[str, str, int], str] = {}
    pairs = [
        (meeting.setdefault((call.block, kind, i), name), name)
        for call in program.calls
        for kind, names in (("in", call.inputs), ("out", call.outputs))
        for i, name in enumerate(names)
    ]
    return {name: f"value:{group}" for name, group in _grouped(pairs).items()}


def _parameter_groups(program: Program) -> dict[str, str]:
    """Parameter name → its group: those of one layer class, those that are tied, and one read in several blocks."""
    pairs = []
    for call in program.calls:
        first = program.call_of(call.block)
        for node in program.blocks[call.block].placeholders(Role.PARAMETER):
            name = call.full_name(info(node).ref)
            pairs += [(first.full_name(info(node).ref), name), (program.tied.get(name, name), name)]
    return _grouped(pairs)


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Each name → a name that stands for all that pairs connect it with."""
    parent: dict[str, str] = {}

    def find(name: str) -> str:
        while parent.setdefault(name, name) != name:
            name = parent[name]
        return name

    for first, name in pairs:
        parent[find(name)] = find(first)
    return {name: find(name) for name in list(parent)}
