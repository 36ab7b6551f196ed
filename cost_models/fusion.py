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
from autopar.ir.ops import convert
from autopar.placement import Strategy

_ZERO = sympy.Integer(0)


@dataclass
class _Group:
    """Ops of one kernel."""

    members: list[fx.Node] = field(default_factory=list)


def fused(
    block: Block, of: Mapping[str, Strategy], costs: Mapping[fx.Node, Sequence[OpCost]], ranks: int
) -> list[OpCost]:
    """The costs of a compiled block, an op each: of products and attentions as they are, of others a share of a kernel.

    A part of a layer that is recomputed then takes its share, though torch makes kernels of their own for it.
    """
    groups = _groups(block, of, costs)
    kernels = {id(g): _cost(block, g, of, costs, ranks) for g in {id(g): g for g in groups.values()}.values()}
    found: list[OpCost] = []
    for node in block.ops:
        found += [kernels[id(groups[node])]] if node in groups and costs[node][0].forward_bytes != 0 else costs[node]
    return found


def _groups(
    block: Block, of: Mapping[str, Strategy], costs: Mapping[fx.Node, Sequence[OpCost]]
) -> dict[fx.Node, _Group]:
    levels: dict[fx.Node, int] = {}
    groups: dict[fx.Node, _Group] = {}
    for node in block.ops:
        fuses = node.target is not convert and all(cost.kind == "memory" for cost in costs[node])
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
) -> OpCost:
    """What each op of a group that is no view takes of its kernel, one each way."""
    work = sum(any(cost.forward_bytes != 0 for cost in costs[node]) for node in group.members)
    share = sympy.Rational(1, max(1, work))
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
    sharded = any(cost.sharded for node in group.members for cost in costs[node])
    name, forward = group.members[0].name, inputs + outputs
    return OpCost(name, "memory", _ZERO, share * forward, _ZERO, share * backward, sharded, (share, share))
