"""The layers of a program under torch.compile: one compilation a class, whichever of its layers runs first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn

from . import random
from .parameters import layers_of

BACKEND = "inductor"
_CHECKPOINTS = {"checkpoint", "_recomputed"}


def compile_layers(model: nn.Module, layers: Sequence[str]) -> None:
    """Compile the methods of the classes of the layers in the containers at the paths `layers`.

    Hooks of fully_shard run outside of what is compiled, and so does checkpoint: the part that backward computes
    again is a method, compiled inside of it. Collectives and parts of parameters are in the graph; dropout is not:
    its masks come from generators of their own, and are those of the program without torch.compile.
    """
    for name in ("_masked", "_seeded_attention"):
        setattr(random, name, torch.compiler.disable(getattr(random, name)))
    for kind in dict.fromkeys(type(layer) for layer in layers_of(model, layers).values()):
        for owner in kind.__mro__:
            if owner.__module__.partition(".")[0] != "torch":
                _compile_methods(owner)


def _compile_methods(kind: type) -> None:
    for name, method in list(vars(kind).items()):
        if isinstance(method, FunctionType) and not name.startswith("__") and _is_whole(method):
            compiled: Callable[..., Any] = torch.compile(method, dynamic=False, backend=BACKEND)
            setattr(kind, name, compiled)


def _is_whole(method: FunctionType) -> bool:
    """Not compiled yet, and without a checkpoint, which would be a graph of its own inside the graph."""
    return not hasattr(method, "_torchdynamo_orig_callable") and not _CHECKPOINTS & set(method.__code__.co_names)
