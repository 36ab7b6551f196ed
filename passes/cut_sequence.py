"""From a program typed on cp to that of one rank: `s` becomes the length of its part of the sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from autopar.errors import PlanError
from autopar.ir.graph import COUNT, NodeInfo, Program, Role, S, Shape, info, node_inputs, set_info, update_info
from autopar.ir.ops import gathered_attention, ring_attention
from autopar.ir.values import drop_unread
from autopar.placement import Shard
from autopar.plan.plan import Plan, asked_length, lengths_that_work
from autopar.rules.arguments import option
from autopar.rules.attention import is_causal, is_zigzag
from autopar.rules.verify import Level
from autopar.runtime.choices import Batch
from autopar.runtime.tiles import Layout, hops

aten = torch.ops.aten

_ATTENTION = aten.scaled_dot_product_attention.default


@dataclass(frozen=True)
class CutSequence:
    """Shapes and sizes of one rank of cp, conversions over cp as plain ops, attention that knows of other ranks.

    Requires: a program with its conversions over cp. Ensures: no strategy is left, and tp may be typed.

        ids [b, s], x [b, s, d]: S(1)           |   ids [b, 2·s], x [b, s, d]
        attention(q, k, v): S(2), S(2), S(2)    |   ring_attention(q, k, v, axis="cp", ranks=2)
        attention(q, k, v, causal): S(2), Rp…   |   gathered_attention(q, k, v, axis="cp")
        attention(q, k, v, mask)  # window=5    |   ring_attention(q, k, v, axis="cp", ranks=2, window=5)
    """

    name: ClassVar[str] = "cut_sequence"
    leaves: ClassVar[Level] = Level.TRACED

    def apply(self, program: Program, plan: Plan | None) -> Program:
        assert plan is not None
        ranks = plan.mesh.cp
        if ranks == 1:
            return program
        if program.opaque:
            names = ", ".join(program.opaque)
            raise PlanError(f"cp={ranks}: {names} is kept whole, so its gradients would count {ranks} times: use cp=1")
        zigzag = is_zigzag(program, plan.context.name, ranks, plan.batch.sequence)
        check_length(plan.batch, ranks, zigzag)
        program = program.copy_blocks()
        for block in program.blocks.values():
            if block.name == COUNT:  # it reads the whole of what the model is given
                continue
            for node in block.ops:
                if node.target is _ATTENTION:
                    _cut_attention(node, plan, zigzag)
            for node in block.nodes:
                node.args = _longer(node.args, ranks)
                node.kwargs = _longer(node.kwargs, ranks)
                set_info(node, _local(info(node), ranks))
        inputs = {name: replace(t, shape=_scaled(t.shape, ranks)) for name, t in program.inputs.items()}
        return drop_unread(replace(program, inputs=inputs, zigzag=zigzag))  # masks, where a window says the same


def check_length(batch: Batch, ranks: int, zigzag: bool) -> None:
    """PlanError where a sequence has in zigzag no equal chunks."""
    if zigzag and batch.sequence % (2 * ranks):
        raise PlanError(
            f"{asked_length(batch)} is not divisible by 2 × cp={ranks}, as causal attention needs "
            f"for equal work on each rank: use {lengths_that_work(batch, 2 * ranks, 2 * ranks)}, "
            "another cp or attention='ulysses'"
        )


def _local(facts: NodeInfo, ranks: int) -> NodeInfo:
    shape = _scaled(facts.shape, ranks)
    if facts.strategy is not None and facts.placement.is_shard:
        dim = facts.placement.dim
        shape = (*shape[:dim], shape[dim] / ranks, *shape[dim + 1 :])
    role = Role.OP if facts.role is Role.CONVERT else facts.role
    context = facts.placement if facts.strategy is not None else None
    return replace(facts, shape=shape, role=role, strategy=None, context=context)


def _scaled(shape: Shape, ranks: int) -> Shape:
    """A size of the whole sequence by the length of a part."""
    return tuple(_length(size, ranks) for size in shape)


def _length(size: sympy.Expr, ranks: int) -> sympy.Expr:
    return size.subs(S, ranks * S)


def _longer(argument: Any, ranks: int) -> Any:
    if isinstance(argument, tuple | list):
        return type(argument)(_longer(a, ranks) for a in argument)
    if isinstance(argument, dict):
        return {key: _longer(value, ranks) for key, value in argument.items()}
    return _length(argument, ranks) if isinstance(argument, sympy.Expr) else argument


def _cut_attention(node: fx.Node, plan: Plan, zigzag: bool) -> None:
    """The function that computes fused attention under the node's strategy."""
    strategy, ranks = info(node).strategy, plan.mesh.cp
    assert strategy is not None
    q, k = strategy.inputs[:2]
    causal, window = is_causal(node), info(node).window
    if window is not None and window >= plan.batch.sequence:  # it has all keys up to the row's own
        window = None
    options = {"axis": "cp", "is_causal": causal, "zigzag": zigzag and causal, "scale": option(node, "scale")}
    if window is not None:
        options["window"] = window
    if q == k == Shard(2):
        tokens = plan.batch.sequence // ranks
        layout = Layout(ranks, tokens, tokens, causal, zigzag and causal, window)
        furthest = max(hops(layout, block) for block in range(ranks))
        node.target, node.kwargs = ring_attention, {**options, "ranks": ranks, "hops": furthest}
    elif q == Shard(2) and causal:
        node.target, node.kwargs = gathered_attention, options
    else:
        return
    node.args = tuple(node_inputs(node)[:3])
    update_info(node, window=None)
