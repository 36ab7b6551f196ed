"""In-place ops of the user's forward: written as what they compute, or refused.

The exported training IR keeps `x.add_(y)` as it was called, and dataflow alone does not show that later readers
of `x` see the sum. Where nothing shares x's memory, the op becomes its functional form and later readers read
that; where something may (a view of x, or x a view, a parameter or a buffer), the trace is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..errors import TraceError


def mutates(node: fx.Node) -> bool:
    """Whether the op changes an operand."""
    schema = getattr(node.target, "_schema", None)  # every OpOverload has one; torch offers no public name
    return bool(schema is not None and schema.is_mutable)


def functional(node: fx.Node, source: str) -> Any:
    """The op that computes what an in-place op writes; raises TraceError where others may share the memory."""
    target: Any = node.target
    packet, overload = target.overloadpacket, target._overloadname
    name = packet.__name__.removesuffix("_")
    plain = getattr(getattr(torch.ops.aten, name, None), overload, None)
    operand = node.args[0]
    if plain is None or not isinstance(operand, fx.Node) or _changes_others(target) or _shared(operand):
        raise TraceError(
            f"the in-place op {packet.__name__} at {source} changes memory that other values may share: "
            f"write it out of place there (x = x.{name}(…), torch.where, torch.cat)"
        )
    return plain


def _changes_others(target: Any) -> bool:
    """An op that writes to more than its first operand, as batch norm does to its statistics."""
    return any(a.alias_info is not None and a.alias_info.is_write for a in target._schema.arguments[1:])


def _shared(operand: fx.Node) -> bool:
    if operand.op == "placeholder" or _is_view(operand):
        return True
    return any(_is_view(user) for user in operand.users)


def _is_view(node: fx.Node) -> bool:
    """Whether the result shares memory with an operand, or may."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return True
    may_view = {torch.ops.aten.reshape.default, torch.ops.aten.contiguous.default, torch.ops.aten.to.dtype}
    aliases = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return aliases or node.target in may_view
