"""What torch says of an op: the arguments of its schema, and its tags."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..ir.graph import arguments


def is_torch_op(target: Any) -> bool:
    """Whether a target is an op of torch, with schema and tags."""
    return isinstance(target, torch._ops.OpOverload)  # private path: its class has no public name


def is_tagged(target: Any, tag: torch.Tag) -> bool:
    """Whether torch tags an op so, one with one result that writes no memory."""
    if not is_torch_op(target) or tag not in target.tags:
        return False
    return not target._schema.is_mutable and len(target._schema.returns) == 1


def option(node: fx.Node, name: str, default: Any = None) -> Any:
    """An argument of an op by its schema's name, or its default; `default` where it is None or has no such argument."""
    target: Any = node.target
    if not hasattr(target, "_schema"):  # an op of our own, whose options have names
        return node.kwargs.get(name, default)
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == name:
            given = arguments(node)[position] if position < len(node.args) else node.kwargs.get(name)
            given = argument.default_value if given is None else given
            return default if given is None else given
    return default


def dims_of(value: Any, rank: int) -> set[int]:
    """A dim or list of dims as numbers from 0; all of them for None and for an empty list."""
    dims = [value] if isinstance(value, int) else list(range(rank)) if value is None or not value else list(value)
    return {int(d) % rank for d in dims} if rank else set()
