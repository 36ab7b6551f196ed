"""Placements in words: comments where one changes, local shapes, and the table of a class's parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ..ir.graph import NodeInfo, Role, info, node_inputs, op_name
from ..ir.ops import is_collective
from ..placement import CONVERSIONS, Kind, Placement
from .idioms import region_call
from .text import size_text

aten = torch.ops.aten

_TABLE_NAMES = 48  # the width of a row's names in a table
_ARGUMENTS = 48  # the width of a comment beside a method's arguments
_NOTE = {Kind.REPLICATE: "Replicate", Kind.GRAD_PARTIAL: "Replicate", Kind.PARTIAL: "Partial"}
_BACKWARD = {
    "copy_to": "all-reduce", "split": "all-gather", "gather": "slice", "all_gather": "reduce-scatter",
    "all_reduce": "nothing", "reduce_scatter": "all-gather", "all_to_all": "all-to-all", "take_shard": "zero-pad",
    "grad_from_first": "keep on one rank", "value_from_first": "nothing", "all_reduce_both": "all-reduce",
    "both_from_first": "keep on one rank", "pad_shard": "slice",
}  # fmt: skip


# --------------------------------------------------------------------------------
# Comments


def comment_of(node: fx.Node, head: fx.Node, tp: int) -> str:
    """The comment of a line, whose inner op is `head`: a change of placement, or nothing."""
    facts = info(node)
    if is_collective(node.target) and node.kwargs["axis"] != "tp":
        return _over(node, str(node.kwargs["axis"]))
    if tp == 1 or facts.strategy is None:
        return ""
    if is_collective(node.target):
        source, target = facts.strategy.inputs[0], facts.strategy.output
        name = op_name(node)
        moves = name not in ("copy_to", "grad_from_first")
        changes = f"{_words(source)} → {_words(target)}" if moves else "forward: nothing"
        return f"{changes}; backward: {_BACKWARD[name]}" if facts.requires_grad else changes
    if node.target is region_call:
        return "→ Partial" if facts.placement.kind is Kind.PARTIAL else ""
    return {"column-parallel": "column-parallel", "row-parallel": "row-parallel → Partial"}.get(parallel(head), "")


def parallel(node: fx.Node) -> str:
    """ "column-parallel" or "row-parallel" for a product with a sharded parameter, else ""."""
    operands, strategy = node_inputs(node), info(node).strategy
    if node.target not in (aten.linear.default, aten.matmul.default, aten.mm.default) or strategy is None:
        return ""
    weight, placement = operands[1], strategy.inputs[1]
    if info(weight).role is not Role.PARAMETER or len(info(weight).shape) != 2 or not placement.is_shard:
        return ""
    output = 0 if node.target is aten.linear.default else 1
    return "column-parallel" if placement.dim == output else "row-parallel"


def _over(node: fx.Node, axis: str) -> str:
    name, dims = op_name(node), iter(node.args[1:])
    kinds = next(kinds for kinds, conversion in CONVERSIONS.items() if conversion.function == name)
    ends = [f"Shard({next(dims)})" if kind is Kind.SHARD else _NOTE[kind] for kind in kinds]
    backward = f"; backward: {_BACKWARD[name]}" if info(node).requires_grad else ""
    return f"over {axis}: {' → '.join(ends) if ends[0] != ends[1] else ends[0]}{backward}"


def _words(placement: Placement) -> str:
    """ "Shard(1)", "Replicate", "Partial"."""
    return f"Shard({placement.dim})" if placement.is_shard else _NOTE[placement.kind]


# --------------------------------------------------------------------------------
# Shapes of ranks


def argument_shapes(names: Mapping[fx.Node, str], tp: int) -> str:
    """A comment with the local shapes of the arguments that have a gradient."""
    shown = []
    for node, name in names.items():
        facts = info(node)
        if facts.requires_grad:
            context = facts.placement_on("cp")
            over_cp = f"{_words(context)}@cp " if context is not None else ""
            over_tp = f"{_words(facts.placement)}@tp " if tp > 1 else ""
            shown.append(f"{name}: {over_cp}{over_tp}{_local_shape(facts, tp)}")
    shown = shown if len(", ".join(shown)) < _ARGUMENTS else shown[:1]
    return ", ".join(shown)


def _local_shape(facts: NodeInfo, tp: int) -> str:
    """The shape of a tensor on the first rank: "[b, s/2, 32]"."""
    sizes = [size_text(n) for n in facts.shape]
    if facts.placement.is_shard:
        dim, size = facts.placement.dim, facts.shape[facts.placement.dim]
        sizes[dim] = str(-(-int(size) // tp)) if size.is_number else f"{sizes[dim]}/{tp}"
    return f"[{', '.join(sizes)}]"


# --------------------------------------------------------------------------------
# The table of a class


def placement_table(parameters: Sequence[fx.Node], values: Mapping[fx.Node, str], tp: int) -> list[str]:
    """Rows of a table: name, global shape, placement, local shape; `values` come in, and have a row with a gradient.

    Neighbours that lie alike share a row. No rows without parameters, or where tp shards none.
    """
    if tp == 1 or not parameters:
        return []
    nodes = {n: info(n).ref for n in parameters} | {n: name for n, name in values.items() if info(n).requires_grad}
    rows: list[tuple[str, ...]] = []
    for node, name in nodes.items():
        shape = f"[{', '.join(map(size_text, info(node).shape))}]"
        rest = (shape, _placement(info(node), tp), _note(node))
        before = rows[-1][0] if rows and rows[-1][1:] == rest else ""
        if before.partition(".")[0] == name.partition(".")[0] and len(before) + len(name) < _TABLE_NAMES:
            rows[-1] = (f"{before}, {name}", *rest)
        else:
            rows.append((name, *rest))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _placement(facts: NodeInfo, tp: int) -> str:
    """ "Shard(0) → [32, 64]"; an uneven dim has the size of the largest shard."""
    if not facts.placement.is_shard:
        return _words(facts.placement)
    size = facts.shape[facts.placement.dim]
    uneven = "≤ " if size.is_number and int(size) % tp else ""
    return f"{_words(facts.placement)} → {uneven}{_local_shape(facts, tp)}"


def _note(node: fx.Node) -> str:
    """A note on a parameter: which kind of product its shards make, or that tp sums its gradient."""
    facts = info(node)
    if facts.role is not Role.PARAMETER:
        return ""
    if facts.placement.kind is Kind.GRAD_PARTIAL:
        return "gradient summed over tp"
    for user in node.users:
        if parallel(user) and node_inputs(user)[1] is node:
            return parallel(user)
        if op_name(user) == "embedding" and facts.placement.is_shard and facts.placement.dim == 0:
            return "a range of its rows"
    return ""
