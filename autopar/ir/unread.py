"""Tensors of the original model that its loss never reads: kept to be saved, and named to the user."""

from __future__ import annotations

from .graph import Program, Role, info

_SHOWN = 4


def read_names(program: Program, role: Role) -> set[str]:
    """The names under which the calls read parameters or buffers."""
    return {
        call.full_name(info(n).ref) for call in program.calls for n in program.blocks[call.block].placeholders(role)
    }


def unread_parameters(program: Program) -> list[str]:
    """By their first names, where none of their names is read."""
    read = read_names(program, Role.PARAMETER)
    read |= {program.tied.get(name, name) for name in read}
    return [name for name in program.parameters if name not in read | set(program.tied)]


def unread_buffers(program: Program) -> list[str]:
    """Of the model's state_dict; not the statistics that forward updates."""
    read = read_names(program, Role.BUFFER) | set(program.mutated)
    return [name for name in program.persistent if name not in read]


def unread_note(program: Program) -> list[str]:
    """A line for the plan table."""
    names = unread_parameters(program)
    if not names:
        return []
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return [f"unread: the loss never reaches {len(names)} parameters, which keep their values: {shown}"]
