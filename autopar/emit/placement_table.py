"""The table in a class's docstring: where its parameters lie on tp."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ..ir.graph import NodeInfo, Role, info, node_inputs, op_name
from ..placement import Kind
from .comments import parallel, placement_text
from .text import size_text

_WIDTH = 96


def placement_table(parameters: Sequence[fx.Node], values: Sequence[tuple[str, NodeInfo]], tp: int) -> list[str]:
    """Rows of a table: name, global shape, placement, what this rank has; `values` are activations that come in.

    Neighbours that lie alike share a row.
    """
    rows: list[tuple[str, ...]] = []
    for name, facts, note in (
        *((info(n).ref, info(n), _note(n)) for n in parameters if info(n).role is Role.PARAMETER),
        *((name, facts, "") for name, facts in values),
    ):
        rest = (_shape(facts), _placement(facts, tp), note)
        near = rows and rows[-1][0].partition(".")[0] == name.partition(".")[0]
        if near and rows[-1][1:] == rest and len(rows[-1][0]) + len(name) < _WIDTH // 2:
            rows[-1] = (f"{rows[-1][0]}, {name}", *rest)
        else:
            rows.append((name, *rest))
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _shape(facts: NodeInfo) -> str:
    return f"[{', '.join(size_text(n) for n in facts.shape)}]"


def _placement(facts: NodeInfo, tp: int) -> str:
    """ "Shard(0) → [32, 64]"; an uneven dim has the size of the largest shard."""
    if not facts.placement.is_shard:
        return placement_text(facts.placement)
    size = facts.shape[facts.placement.dim]
    uneven = "≤ " if size.is_number and int(size) % tp else ""
    return f"{placement_text(facts.placement)} → {uneven}{local_shape(facts, tp)}"


def local_shape(facts: NodeInfo, tp: int) -> str:
    """What the first rank has of a tensor: "[b, s/2, 32]"."""
    sizes = [size_text(n) for n in facts.shape]
    if facts.placement.is_shard:
        dim, size = facts.placement.dim, facts.shape[facts.placement.dim]
        sizes[dim] = str(-(-int(size) // tp)) if size.is_number else f"{sizes[dim]}/{tp}"
    return f"[{', '.join(sizes)}]"


def _note(node: fx.Node) -> str:
    """What a shard of a weight means for the matmul that reads it; whose gradient is summed over tp."""
    facts = info(node)
    if facts.placement.kind is Kind.GRAD_PARTIAL:
        return "gradient summed over tp"
    if not facts.placement.is_shard:
        return ""
    for user in node.users:
        if parallel(user) and node_inputs(user)[1] is node:
            return parallel(user)
        if op_name(user) == "embedding" and facts.placement.dim == 0:
            return "a range of its rows"
    return ""
