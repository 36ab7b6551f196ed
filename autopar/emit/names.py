"""The names model.py uses itself, and how those of the user's model keep clear of them."""

from __future__ import annotations

import builtins
from collections.abc import Container

from torch import nn

from ..errors import PlanError
from ..ir.graph import Program, Role, info
from ..ir.identifiers import COUNTS, identifier
from ..ir.ops import COLLECTIVES
from ..plan.recompute import by_layer

_GLOBALS = frozenset({
    "torch", "nn", "F", "checkpoint", "Settings", "Model", "count_targets",
    "SETTINGS", "LAYERS", "TIED", "RECOMPUTE", "GROUPS", "PARTS", "UNUSED", "OPAQUE", "OPTIONAL", "PARAMETER_GROUPS",
    "parameter", "buffer", "tie", "submodule", "local", "summed", "statistics",
    "embedding", "cross_entropy", "batch_norm", "dropout", "attention",
    "PATHS", "rotate", "range", "super", "staticmethod", "max", "min", "float", "str", "dict", *COLLECTIVES,
    "ENDS", "head_of", "experts", "ring_attention", "gathered_attention", "linear_cross_entropy", "OpaqueModules",
})  # fmt: skip
_RESERVED = _GLOBALS | {"b", "s", "device", "self", "received", "layer", "i", "_"}
_OF_MODEL = (
    "_count", "_first", "_last", "_start", "_stop", "_prologue", "_epilogue", "_tables", "_between",
    "_range", "_layers", "between_stages",
)  # fmt: skip
# What Model.forward calls; it keeps the names of inputs.
_OF_FORWARD = ("self", "range", "checkpoint", "max", "min", "str", "PATHS")
_OF_RECOMPUTED_LAYER = ("_recompute", "_layer", "_again")
_INSTEAD = {"embedding": "embedded", "attention": "attn", "cross_entropy": "loss"}


def value_name(base: str, taken: Container[str]) -> str:
    """An identifier for a value: the base, or with a number where the base is taken."""
    return _unlike(_INSTEAD.get(base, identifier(base, "v")), _RESERVED, taken)


def argument_name(name: str) -> str:
    """What a method calls a keyword input of the model."""
    return f"{name}_" if name in _RESERVED else name


def class_name(block: str, program: Program) -> str:
    """The Python class of a layer block."""
    taken = _RESERVED | {"stage"} | set(dir(builtins))  # what Model.__init__ takes, too
    return block if block not in taken else _unlike(f"{block}Layer", taken, program.blocks)


def loop_name(name: str, program: Program) -> str:
    """A name of Model.forward's own (`received`, `layer`, `i`), whose arguments are the model's inputs."""
    return _unlike(name, program.inputs)


def check_attributes(program: Program) -> None:
    """PlanError where the emitted classes would lose an attribute of the model to one of their own or of nn.Module."""
    reserved = (*_OF_MODEL, *{f"_{call.block}": 0 for call in program.layer_calls if program.is_between(call.block)})
    of_modules = set(dir(nn.Module()))
    for name in (*program.parameters, *program.buffers):
        if name.partition(".")[0] in reserved or COUNTS.fullmatch(name.rpartition(".")[2]):
            raise _clash(program, name, reserved)
        if taken := of_modules.intersection(name.split(".")):
            raise PlanError(f"{name!r} of {program.name}: every nn.Module has an attribute {taken.pop()}: rename it")
    for name in program.inputs:
        if name in _OF_FORWARD:
            raise _clash(program, f"the input {name}", _OF_FORWARD)
    for layer in by_layer(program.recompute):
        call = program.layer_calls[layer]
        for node in program.blocks[call.block].placeholders(Role.PARAMETER, Role.BUFFER):
            if info(node).ref.partition(".")[0] in _OF_RECOMPUTED_LAYER:
                raise _clash(program, call.full_name(info(node).ref), _OF_RECOMPUTED_LAYER)


def _clash(program: Program, name: str, reserved: tuple[str, ...]) -> PlanError:
    return PlanError(
        f"{name} of {program.name} has a name that the emitted class uses itself: rename it, "
        f"to none of {', '.join(reserved)}"
    )


def _unlike(base: str, *taken: Container[str]) -> str:
    number, name = 1, base
    while any(name in names for names in taken):
        number += 1
        name = f"{base}_{number}"
    return name
