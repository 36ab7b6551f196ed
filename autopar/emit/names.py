"""The names that model.py has of its own, where they are from, and how the user's model's keep clear of them."""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Collection, Container, Iterable, Sequence
from typing import TypeVar

from torch import nn

from ..errors import PlanError
from ..ir.graph import Block, Call, Program, Role, info
from ..ir.identifiers import COUNTS, identifier, is_plain
from ..ir.ops import COLLECTIVES
from .layer_runs import parent

_Key = TypeVar("_Key")
_OF_TORCH = {
    "torch": "import torch",
    "F": "import torch.nn.functional as F",
    "nn": "from torch import nn",
    "checkpoint": "from torch.utils.checkpoint import checkpoint",
}
_OF_RUNTIME = {
    "attention": ("gathered_attention", "ring_attention"),
    "collectives": (*COLLECTIVES, "head_of"),
    "experts": ("experts",),
    "linear_loss": ("linear_cross_entropy",),
    "loss": ("cross_entropy", "embedding"),
    "norm": ("batch_norm", "statistics"),
    "opaque": ("OpaqueModules",),
    "parameters": ("buffer", "local", "parameter", "submodule", "summed", "tie"),
    "random": ("attention", "dropout"),
    "settings": ("Settings",),
}
_GLOBALS = frozenset({
    *_OF_TORCH, *(name for names in _OF_RUNTIME.values() for name in names), "Model", "count_targets", "rotate",
    "SETTINGS", "LAYERS", "TIED", "RECOMPUTE", "GROUPS", "PARTS", "UNUSED", "OPAQUE", "OPTIONAL", "PARAMETER_GROUPS",
    "PATHS", "ENDS", "range", "super", "staticmethod", "max", "min", "float", "str", "dict",
})  # fmt: skip
_RESERVED = _GLOBALS | {"b", "s", "device", "self", "received", "layer", "i", "_"}
OF_MODEL = (
    "_count", "_first", "_last", "_start", "_stop", "_prologue", "_epilogue", "_tables", "_between",
    "_range", "_layers", "between_stages",
)  # fmt: skip
# What Model.forward calls; it keeps the names of inputs.
_OF_FORWARD = ("self", "range", "checkpoint", "max", "min", "str", "PATHS")
OF_RECOMPUTED_LAYER = ("_recompute", "_layer", "_recomputed")
_INSTEAD = {"embedding": "embedded", "attention": "attn", "cross_entropy": "loss"}


def imports(names: Collection[str]) -> list[str]:
    """The import lines of those of the names that torch and the saved runtime have."""
    lines = [line for name, line in _OF_TORCH.items() if name in names]
    modules = {module: [n for n in sorted(of_module) if n in names] for module, of_module in _OF_RUNTIME.items()}
    ours = [f"from runtime.{module} import {', '.join(used)}" for module, used in modules.items() if used]
    return [*lines, "", *ours]


def value_name(base: str, taken: Container[str]) -> str:
    """An identifier for a value: the base, or with a number where the base is taken."""
    return _unlike(_INSTEAD.get(base, identifier(base, "v")), _RESERVED, taken)


def free_names(bases: Iterable[tuple[_Key, str]], taken: Collection[str]) -> dict[_Key, str]:
    """For each key a name like its base, none of them taken or given twice."""
    names: dict[_Key, str] = {}
    for key, base in bases:
        names[key] = value_name(base, {*taken, *names.values()})
    return names


def method_names(block: Block, bases: Sequence[str]) -> list[str]:
    """Names like the bases for methods of a layer's class, which has attributes for its parameters and buffers."""
    attributes = {info(n).ref.partition(".")[0] for n in block.placeholders(Role.PARAMETER, Role.BUFFER)}
    return list(free_names(enumerate(bases), attributes).values())


def argument_name(name: str) -> str:
    """The name that a method has for a keyword input of the model."""
    return f"{name}_" if name in _RESERVED else name


def class_names(program: Program) -> dict[str, str]:
    """Layer block → the name of its Python class.

    Layers of one class of the model that differ are called by their lists (T5BlockEncoder, T5BlockDecoder) and by their
    place in it (T5BlockEncoderFirst) where that tells them apart, else they are numbered.
    """
    layers = [call for call in program.layer_calls if not program.is_between(call.block)]
    blocks = dict.fromkeys(call.block for call in layers)
    # Of several blocks of one class all but the first have a number at the end.
    kinds = {b: max((kind for kind in blocks if b.removeprefix(kind).isdigit()), key=len, default=b) for b in blocks}
    names = {b: kind + _place(b, [c for c in layers if kinds[c.block] == kind]) for b, kind in kinds.items()}
    uses = Counter(names.values())
    unclear = {kinds[block] for block, name in names.items() if uses[name] > 1}
    taken = _RESERVED | {"stage"} | set(dir(builtins))  # what Model.__init__ takes, too

    def free(name: str) -> str:
        return _unlike(f"{name}Layer", taken, blocks) if name in taken else name

    return {block: free(block if kinds[block] in unclear else name) for block, name in names.items()}


def _place(block: str, layers: Sequence[Call]) -> str:
    """The place of a block among the layers of its class: "EncoderFirst", "Encoder"; "" where no place is its own."""
    path, *more = {parent(call): 0 for call in layers if call.block == block}
    if more:
        return ""
    blocks = [call.block for call in layers if parent(call) == path]
    ends = {(True, False): "First", (False, True): "Last"}
    alone = blocks.count(block) == 1
    end = ends.get((blocks[0] == block, blocks[-1] == block), "") if alone else ""
    words = _words(path, {parent(call) for call in layers} - {path})
    return "".join(word.title().replace("_", "") for word in words) + end


def _words(path: str, others: Collection[str]) -> list[str]:
    """The words of a list's path that no other list has in its own; none without others."""
    known = {word for other in others for word in other.split(".")}
    return [word for word in path.split(".") if known and word not in known and is_plain(word)]


def loop_name(name: str, program: Program) -> str:
    """A name of Model.forward's own (`received`, `layer`, `i`), whose arguments are the model's inputs."""
    return _unlike(name, program.inputs)


def check_attributes(program: Program, recomputed: Iterable[Call] = ()) -> None:
    """PlanError where the emitted classes would lose an attribute of the model to one of their own or of nn.Module.

    recomputed: the layers of which backward computes something again, whose classes have attributes for that.
    """
    reserved = (*OF_MODEL, *{f"_{call.block}": 0 for call in program.layer_calls if program.is_between(call.block)})
    of_modules = set(dir(nn.Module()))
    for name in (*program.parameters, *program.buffers):
        if name.partition(".")[0] in reserved or COUNTS.fullmatch(name.rpartition(".")[2]):
            raise _clash(program, name, reserved)
        if taken := of_modules.intersection(name.split(".")):
            raise PlanError(f"{name!r} of {program.name}: every nn.Module has an attribute {taken.pop()}: rename it")
    for name in program.inputs:
        if name in _OF_FORWARD:
            raise _clash(program, f"the input {name}", _OF_FORWARD)
    for call in recomputed:
        for node in program.blocks[call.block].placeholders(Role.PARAMETER, Role.BUFFER):
            if info(node).ref.partition(".")[0] in OF_RECOMPUTED_LAYER:
                raise _clash(program, call.full_name(info(node).ref), OF_RECOMPUTED_LAYER)


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
