"""Who reads the parameters and buffers of a program: nothing at all, or more than their own layer."""

from __future__ import annotations

from collections.abc import Iterator

from .graph import Call, Program, Role, info


def read_names(program: Program, role: Role) -> set[str]:
    """The names under which the calls read parameters or buffers."""
    return {
        call.full_name(info(n).ref) for call in program.calls for n in program.blocks[call.block].placeholders(role)
    }


def unread_parameters(program: Program) -> list[str]:
    """Parameters that nothing reads under any of their names, by their first names."""
    read = read_names(program, Role.PARAMETER)
    read |= {program.tied.get(name, name) for name in read}
    return [name for name in program.parameters if name not in read | set(program.tied)]


def unread_buffers(program: Program) -> list[str]:
    """Buffers of the model's state_dict that nothing reads or updates."""
    read = read_names(program, Role.BUFFER) | set(program.mutated)
    return [name for name in program.persistent if name not in read]


def read_elsewhere(program: Program) -> Iterator[tuple[str, Call, Call]]:
    """(name, its layer's call, another call) of each parameter of a layer that something else reads too.

    A weight penalty over all parameters does so. A layer's parameters are on its stage, and under ZeRO-3 whole during
    its own forward and backward only.
    """
    layers = {call.path: call for call in program.layer_calls if call.path}
    for call in program.calls:
        for node in program.blocks[call.block].placeholders(Role.PARAMETER):
            name = call.full_name(info(node).ref)
            owner = next((path for path in layers if path != call.path and name.startswith(f"{path}.")), None)
            if owner is not None:
                yield name, layers[owner], call
