"""Restrictions of the intra-op search that have names, and the degrees of tensor parallelism that a model allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx

from ..ir.graph import B, Program, Role, S, Shape, info, node_inputs
from ..placement import GRAD_PARTIAL, REPLICATE, Placement, Shard, Strategy
from ..plan.plan import Solution
from ..rules import rule_of


@dataclass(frozen=True)
class Layout:
    """A restriction of the search: what values between layers and residual sums may be.

    sequence: whether activations may be sharded along the sequence. hidden: the placement of values between
    layers and of residual sums, or None for free; samples: of all values of samples, where they have its dim, and not
    only of those whose dim there is the sequence. divides: the strategies to be taken wherever an op has such.
    attention: the placements of q and k in fused attention, where they are legal.
    """

    name: str
    sequence: bool
    hidden: Placement | None
    divides: Callable[[fx.Node, Strategy], bool] | None
    samples: bool = True
    attention: tuple[Placement, ...] = ()

    def places(self, shape: Shape) -> bool:
        """Whether the layout says how a value of this shape lies between layers.

        With `samples` one of rank 3 is taken to have a sequence (images in patches); scores [b] and features [b, d]
        have none.
        """
        if self.hidden is None or not any(B in n.free_symbols for n in shape):
            return False
        if self.samples:
            return not self.hidden.is_shard or len(shape) > 2
        return len(shape) > self.hidden.dim and S in shape[self.hidden.dim].free_symbols


def _divides_weight(node: fx.Node, option: Strategy) -> bool:
    """A product with a parameter (or experts) whose shard each rank holds, attention over a share of the heads, or
    the rows of a share of the vocabulary."""
    if node.target is torch.ops.aten.embedding.default:
        return info(node_inputs(node)[1]).role is Role.INPUT and option.inputs[0] == Shard(0)
    kind = rule_of(node).kind
    if kind == "attention":
        return option.output.is_shard
    if kind not in ("matmul", "experts"):
        return False
    roles = [info(n).role for n in node_inputs(node)]
    weights = [p for p, role in zip(option.inputs, roles, strict=True) if role is Role.PARAMETER]
    return any(p.is_shard for p in weights or option.inputs)


def _divides_rows(node: fx.Node, option: Strategy) -> bool:
    """A product with a parameter, or experts, on a share of the sequence."""
    if rule_of(node).kind not in ("matmul", "experts") or not option.output.is_shard:
        return False
    weighted = any(info(n).role is Role.PARAMETER for n in node_inputs(node))
    return weighted and S in info(node).shape[option.output.dim].free_symbols


MEGATRON = Layout("megatron", sequence=False, hidden=REPLICATE, divides=_divides_weight)
MEGATRON_SP = Layout("megatron-sp", sequence=True, hidden=Shard(1), divides=_divides_weight)
FREE = Layout("free", sequence=True, hidden=None, divides=None)

LAYOUTS = (MEGATRON, MEGATRON_SP, FREE)

# Of q, k and v [b, heads, s, e] on cp: sequence and sequence, heads and heads, sequence and whole.
_OVER_CP = Layout("", sequence=True, hidden=Shard(1), divides=_divides_rows, samples=False)
RING = replace(_OVER_CP, name="ring", attention=(Shard(2), Shard(2)))
ULYSSES = replace(_OVER_CP, name="ulysses", attention=(Shard(1),))
ALL_GATHER = replace(_OVER_CP, name="all_gather", attention=(Shard(2), GRAD_PARTIAL))

CONTEXT_LAYOUTS = (RING, ULYSSES, ALL_GATHER)


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
