"""Opaque modules in the emitted program: the line that calls one, and the file that holds them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from ..errors import PlanError
from ..ir.graph import Role, info
from ..placement import REPLICATE
from ..runtime.opaque import FILE, Applied, OpaqueModule
from .op import Op
from .text import Text, attribute, quoted


def opaque_call(op: Op) -> Text:
    """OPAQUE["mlp.router"](self.mlp.router, h): the module, where its parameters are, what it is given."""
    name = op.take("name")
    given = int(op.take("given"))
    tensors: list[fx.Node] = op.take("tensors")
    for used in ("samples", "flops"):
        op.take(used)
    own = tensors[given:]
    for node in own:
        if info(node).role not in (Role.PARAMETER, Role.BUFFER):
            raise PlanError(f"{name} cannot be traced, and several layers share it: give each layer one of its own")
        if info(node).placement != REPLICATE:
            raise PlanError(f"{info(node).ref} of {name}, which is kept whole, is not whole on each GPU: use tp=1")
    module = info(op.node).module if own else ""
    arguments = ", ".join([attribute(module, "submodule") if module else "self", *map(op.show, tensors[:given])])
    return Text(f"OPAQUE[{quoted(name)}]({arguments})", imports=frozenset({"opaque.OpaqueModules"}))


def pack_opaque(modules: Mapping[str, OpaqueModule]) -> bytes:
    """The file that holds the modules; nothing without any. PlanError where another process cannot import a class."""
    if not modules:
        return b""
    for name, opaque in modules.items():
        for kind in _classes(opaque.module):
            if kind.__module__ == "__main__":
                raise PlanError(f"{name} is kept whole, and its class {kind.__name__} is in a script: {_IMPORTABLE}")
    packed = io.BytesIO()
    try:
        torch.save({name: (_kept(opaque.module), opaque.inputs) for name, opaque in modules.items()}, packed)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PlanError(f"{', '.join(modules)}, kept whole, cannot be saved ({error}): {_IMPORTABLE}") from error
    return packed.getvalue()


def save_opaque(folder: Path, packed: bytes) -> None:
    """Write the file beside the program."""
    (folder / FILE).unlink(missing_ok=True)
    if packed:
        (folder / FILE).write_bytes(packed)


def _kept(module: nn.Module) -> Any:
    """What is saved of a module: of a Function its class, for `Applied` is another class in the saved runtime."""
    return module.function if isinstance(module, Applied) else module


def _classes(module: nn.Module) -> list[type]:
    return [module.function] if isinstance(module, Applied) else [type(part) for part in module.modules()]


_IMPORTABLE = "define it at the top of a module that the program can import"
