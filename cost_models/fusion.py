"""Under torch.compile a chain of pointwise ops and reductions is one kernel: its inputs are read and its outputs
written once, forward, and once more backward, which computes the chain again from its inputs (COST_MODEL 2.1).

A group is what such ops make of each other's results between two products, attentions or collectives: ops with
equally many of these before them. So a group never waits for something that waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import sympy
from torch import fx

from autopar.cost_models.layer_costs import OpCost
from autopar.ir.graph import Block, info, node_inputs
from autopar.placement import Strategy

_ZERO = sympy.Integer(0)
_ONE = sympy.Integer(1)


@dataclass
class _Group:
    """Ops of one kernel."""

    members: list[fx.Node] = field(default_factory=list)


def fused(
    block: Block, of: Mapping[str, Strategy], costs: Mapping[fx.Node, Sequence[OpCost]], ranks: int
) -> list[OpCost]:
    """The costs of a compiled block: its products and attentions as they are, all else in groups."""
    groups = _groups(block, of, costs)
    heavy = [cost for node in block.ops if node not in groups for cost in costs[node]]
    kernels = [_cost(block, group, of, costs, ranks) for group in {id(g): g for g in groups.values()}.values()]
    return heavy + [kernel for kernel in kernels if kernel is not None]


def _groups(
    block: Block, of: Mapping[str, Strategy], costs: Mapping[fx.Node, Sequence[OpCost]]
) -> dict[fx.Node, _Group]:
    levels: dict[fx.Node, int] = {}
    groups: dict[fx.Node, _Group] = {}
    for node in block.ops:
        fuses = all(cost.kind == "memory" for cost in costs[node])
        level, joined = 0, _Group()
        for operand, wanted in zip(node_inputs(node), of[node.name].inputs, strict=True):
            converted = of[operand.name].output != wanted
            level = max(level, levels.get(operand, 0) + converted)
        for operand, wanted in zip(node_inputs(node), of[node.name].inputs, strict=True):
            near = operand in groups and levels[operand] == level and of[operand.name].output == wanted
            if fuses and near and groups[operand] is not joined:
                joined = _join(groups, groups[operand], joined)
        levels[node] = level if fuses else level + 1
        if fuses:
            joined.members.append(node)
            groups[node] = joined
    return groups


def _join(groups: dict[fx.Node, _Group], one: _Group, other: _Group) -> _Group:
    one.members += other.members
    for node in other.members:
        groups[node] = one
    return one


def _cost(
    block: Block, group: _Group, of: Mapping[str, Strategy], costs: Mapping[fx.Node, Sequence[OpCost]], ranks: int
) -> OpCost | None:
    """One kernel each way; None for views alone, which are none."""
    if all(cost.forward_bytes == 0 for node in group.members for cost in costs[node]):
        return None
    inside = set(group.members)
    read = dict.fromkeys(
        (operand, wanted.is_shard)
        for node in group.members
        for operand, wanted in zip(node_inputs(node), of[node.name].inputs, strict=True)
        if operand not in inside
    )
    left = [n for n in group.members if n in block.results or any(user not in inside for user in n.users)]

    def size(node: fx.Node, sharded: bool) -> sympy.Expr:
        facts = info(node)
        return sympy.Mul(*facts.shape) * facts.dtype.itemsize / (ranks if sharded else 1)

    inputs = sympy.Add(*(size(*item) for item in read))
    gradients = sympy.Add(*(size(*item) for item in read if info(item[0]).requires_grad))
    outputs = sympy.Add(*(size(node, of[node.name].output.is_shard) for node in left))
    returned = sympy.Add(*(size(node, of[node.name].output.is_shard) for node in left if info(node).requires_grad))
    backward = inputs + returned + gradients if returned != 0 else _ZERO
    first = group.members[0]
    sharded = any(cost.sharded for node in group.members for cost in costs[node])
    return OpCost(first.name, "memory", _ZERO, inputs + outputs, _ZERO, backward, sharded, (_ONE, _ONE))
