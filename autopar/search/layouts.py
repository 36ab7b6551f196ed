"""Restrictions of the intra-op search that have names, and the degrees of tensor parallelism that a model allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from ..ir.graph import Program, S, info, node_inputs
from ..placement import GRAD_PARTIAL, REPLICATE, Placement, Shard, Strategy
from ..plan.plan import Solution
from ..rules import Axis, rule_of
from ..rules.attention import is_zigzag


@dataclass(frozen=True)
class Layout:
    """A restriction of the search: what values between layers and residual sums may be.

    sequence: whether activations may be sharded along the sequence. hidden: the placement of values between
    layers and of residual sums, or None for free. divide: the weight of every matmul, the heads of attention and
    the vocabulary are sharded if they can be; on cp, the rows of every matmul. attention: on cp, the placements of q
    and k in fused attention, where they are legal.
    """

    name: str
    sequence: bool
    hidden: Placement | None
    divide: bool
    attention: tuple[Placement, ...] = ()


MEGATRON = Layout("megatron", sequence=False, hidden=REPLICATE, divide=True)
MEGATRON_SP = Layout("megatron-sp", sequence=True, hidden=Shard(1), divide=True)
FREE = Layout("free", sequence=True, hidden=None, divide=False)


LAYOUTS = (MEGATRON, MEGATRON_SP, FREE)

# Of q, k and v [b, heads, s, e] on cp: sequence and sequence, heads and heads, sequence and whole.
RING = Layout("ring", sequence=True, hidden=Shard(1), divide=True, attention=(Shard(2), Shard(2)))
ULYSSES = Layout("ulysses", sequence=True, hidden=Shard(1), divide=True, attention=(Shard(1),))
ALL_GATHER = Layout("all_gather", sequence=True, hidden=Shard(1), divide=True, attention=(Shard(2), GRAD_PARTIAL))

CONTEXT_LAYOUTS = (RING, ULYSSES, ALL_GATHER)


def context_axis(program: Program, ranks: int, values: Mapping[sympy.Symbol, int], layout: str, tp: int) -> Axis:
    """The axis cp. Only Ulysses shards more than the sequence: in the others its order may be zigzag."""
    parts = 2 * ranks if is_zigzag(program, layout, ranks, values[S]) else ranks
    heads = layout == ULYSSES.name
    return Axis("cp", ranks, sequence=True, model=heads, context=True, inner=tp, parts=parts, values=dict(values))


def replicated(program: Program) -> Solution:
    """The typing of a program on an axis of size 1."""
    strategies = {
        block.name: {n.name: Strategy((REPLICATE,) * len(node_inputs(n)), REPLICATE) for n in block.nodes}
        for block in program.blocks.values()
        if program.count(block.name)
    }
    return Solution(1, strategies, "")


def why_not(program: Program, tp: int, values: Mapping[sympy.Symbol, int]) -> str | None:
    """Why the model cannot be tensor-parallel over `tp` ranks ("25 heads"), or None if it can."""
    for block, node in program.each_op():
        if rule_of(node).kind != "attention":
            continue
        heads, groups = (info(n).shape[1].subs(dict(values)) for n in node_inputs(node)[:2])
        place = f"{block.name}{f'.{info(node).module}' if info(node).module else ''}"
        if heads % tp:
            return f"{heads} heads of {place} are not divisible by {tp}"
        if groups % tp and tp % groups:  # fewer K/V heads than ranks: each rank reads one, with tp / groups others
            return f"{groups} K/V heads of {place} are not divisible by {tp}, nor it by them"
    return None


def position_rows(program: Program) -> int | None:
    """Rows of the smallest table looked up by position (arange over the sequence), or None without one."""
    rows = [
        int(info(weight).shape[0])
        for _, node in program.each_op()
        if node.target is torch.ops.aten.embedding.default
        for weight, ids in [node_inputs(node)]
        if S in info(ids).shape and all(n.target in _POSITIONS for n in _ancestors(ids))
    ]
    return min(rows, default=None)


_POSITIONS = {torch.ops.aten.arange.default, torch.ops.aten.unsqueeze.default, torch.ops.aten.expand.default}


def _ancestors(node: fx.Node) -> list[fx.Node]:
    return [node, *(a for operand in node_inputs(node) for a in _ancestors(operand))]
