"""Comments on lines: where the placement of a value changes, and what backward does there."""

from __future__ import annotations

import torch
from torch import fx

from ..ir.graph import Role, info, node_inputs, op_name
from ..ir.ops import is_collective
from ..placement import CONVERSIONS, Kind, Placement
from .idioms import part

aten = torch.ops.aten

_NOTE = {Kind.REPLICATE: "Replicate", Kind.GRAD_PARTIAL: "Replicate", Kind.PARTIAL: "Partial"}
_BACKWARD = {
    "copy_to": "all-reduce", "split": "all-gather", "gather": "slice", "all_gather": "reduce-scatter",
    "all_reduce": "nothing", "reduce_scatter": "all-gather", "all_to_all": "all-to-all", "take_shard": "zero-pad",
    "grad_from_first": "keep on one rank", "value_from_first": "nothing", "all_reduce_both": "all-reduce",
    "both_from_first": "keep on one rank", "pad_shard": "slice",
}  # fmt: skip


def comment_of(node: fx.Node, head: fx.Node, tp: int) -> str:
    """The comment of a line, whose inner op is `head`: a change of placement, or nothing."""
    facts = info(node)
    if is_collective(node.target) and node.kwargs["axis"] == "cp":
        return _over_cp(node)
    if tp == 1 or facts.strategy is None:
        return ""
    if is_collective(node.target):
        source, target = facts.strategy.inputs[0], facts.strategy.output
        name = op_name(node)
        changes = "forward: nothing" if name in ("copy_to", "grad_from_first") else f"{_before(source, target)}"
        return f"{changes}; backward: {_BACKWARD[name]}" if facts.requires_grad else changes
    if node.target is part:
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


def _over_cp(node: fx.Node) -> str:
    name, dims = op_name(node), iter(node.args[1:])
    kinds = next(kinds for kinds, found in CONVERSIONS.items() if found.function == name)
    ends = [f"Shard({next(dims)})" if kind is Kind.SHARD else _NOTE[kind] for kind in kinds]
    backward = f"; backward: {_BACKWARD[name]}" if info(node).requires_grad else ""
    return f"over cp: {' → '.join(ends) if ends[0] != ends[1] else ends[0]}{backward}"


def _before(source: Placement, target: Placement) -> str:
    return f"{placement_text(source)} → {placement_text(target)}"


def placement_text(placement: Placement) -> str:
    """ "Shard(1)", "Replicate", "Partial"."""
    return f"Shard({placement.dim})" if placement.is_shard else _NOTE[placement.kind]
