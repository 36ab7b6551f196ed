"""An op while it is written: which of its arguments the source has, and which are left."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..ir.graph import arguments, info, node_inputs
from .text import ATOM, Render, literal, size

# Views are reshapes and the fused norms choose their own kernels: neither changes a value.
_WITHOUT_EFFECT = ("memory_format", "cudnn_enable", "cudnn_enabled", "non_blocking")


class Op:
    """An op while it is written. `left`: arguments not at their default that no text has yet, by name."""

    def __init__(self, node: fx.Node, render: Render, device: str, training: str) -> None:
        self.node, self.render, self.device, self.training = node, render, device, training
        target: Any = node.target
        self.schema: list[Any] = target._schema.arguments
        self.given: dict[str, Any] = {
            **{a.name: value for a, value in zip(self.schema, arguments(node), strict=False)},
            **node.kwargs,
        }
        for argument in self.schema:
            default = argument.has_default_value() and _same(self.given.get(argument.name), argument.default_value)
            if default or argument.name in _WITHOUT_EFFECT:
                self.given.pop(argument.name, None)
        self.left = dict(self.given)

    def take(self, name: str, default: Any = None) -> Any:
        return self.left.pop(name, default)

    def shown(self, name: str) -> str:
        return self.show(self.take(name))

    def operand(self, position: int, precedence: int = ATOM) -> str:
        value = self.take(self.schema[position].name)
        if isinstance(value, fx.Node):
            return self.render(value).at(precedence)
        return literal(value) if isinstance(value, int | float) else size(value).at(precedence)

    def show(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.render(value).source
        if isinstance(value, list | tuple):
            inner = ", ".join(self.show(v) for v in value)
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        return literal(value)

    def rest(self) -> str:
        """All that is left, as in a call: in order up to the first gap, then by name; a factory gets its device."""
        texts: list[str] = []
        by_name = False
        for argument in self.schema:
            name = argument.name
            by_name |= argument.kwarg_only or name not in self.given or (name == "dtype" and bool(texts))
            if name in self.left:
                text = self.shown(name)
                texts.append(f"{name}={text}" if by_name else text)
        if any(a.name == "device" for a in self.schema) and not node_inputs(self.node):
            dtype = info(self.node).dtype
            inferred = dtype == torch.float32 or not dtype.is_floating_point
            texts += [] if "dtype" in self.given or inferred else [f"dtype={dtype}"]
            texts.append(f"device={self.device}")
        return ", ".join(texts)

    @property
    def shards(self) -> str:
        """What `runtime.random` needs to give each shard of the result its own randomness."""
        facts = info(self.node)
        placements = (("cp", facts.context), ("tp", facts.placement))
        axes = [f'"{axis}"' for axis, placement in placements if placement is not None and placement.is_shard]
        return f", shards=({', '.join(axes)}{',' * (len(axes) == 1)})" if axes else ""

    def splits(self, position: int, dim: int) -> bool:
        """Whether an operand is sharded on a dim."""
        strategy = info(self.node).strategy
        placement = strategy.inputs[position] if strategy else None
        return placement is not None and placement.is_shard and placement.dim == dim


def _same(value: Any, default: Any) -> bool:
    return value is None if default is None else not isinstance(value, fx.Node) and bool(value == default)
