"""Arguments of an op by the names of its schema."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..ir.graph import arguments


def option(node: fx.Node, name: str, default: Any = None) -> Any:
    """An argument of an op by its schema's name, or its default; `default` where it is None or has no such argument."""
    target: Any = node.target
    for position, argument in enumerate(target._schema.arguments if hasattr(target, "_schema") else ()):
        if argument.name == name:
            given = arguments(node)[position] if position < len(node.args) else node.kwargs.get(name)
            given = argument.default_value if given is None else given
            return default if given is None else given
    return default


def dims_of(value: Any, rank: int) -> set[int]:
    """A dim or list of dims as numbers from 0; all of them for None and for an empty list."""
    dims = [value] if isinstance(value, int) else list(range(rank)) if value is None or not value else list(value)
    return {int(d) % rank for d in dims} if rank else set()
