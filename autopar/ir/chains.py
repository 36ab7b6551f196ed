"""Layers that follow each other so that several can be recomputed as one."""

from __future__ import annotations

from .graph import Call, Program


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
