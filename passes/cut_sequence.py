"""From a program typed on cp to that of one rank: `s` becomes the length of its part of the sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from autopar.errors import PlanError
from autopar.ir.graph import COUNT, Program, Role, S, info, node_inputs, update_info
from autopar.ir.ops import gathered_attention, ring_attention
from autopar.ir.values import drop_unread
from autopar.placement import Shard
from autopar.plan.plan import Plan, asked_length, lengths_that_work
from autopar.rules.arguments import option
from autopar.rules.attention import is_causal, is_zigzag
from autopar.rules.verify import Level
from autopar.runtime.choices import Batch
from autopar.runtime.tiles import Layout, hops

from .cut_batch import cut_sizes, scaled

aten = torch.ops.aten

_ATTENTION = aten.scaled_dot_product_attention.default


@dataclass(frozen=True)
class CutSequence:
    """Shapes and sizes of one rank of cp, conversions over cp as plain ops, attention that knows of other ranks.

    Requires: a program with its conversions over cp. Ensures: shapes are those of a rank, and tp may be typed.

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
                cut_sizes(node, S, "cp", ranks)
                if info(node).role is Role.CONVERT:  # on tp an op like others
                    update_info(node, role=Role.OP)
        inputs = {name: replace(t, shape=scaled(t.shape, S, ranks)) for name, t in program.inputs.items()}
        return drop_unread(replace(program, inputs=inputs, zigzag=zigzag))  # masks, where a window says the same


def check_length(batch: Batch, ranks: int, zigzag: bool) -> None:
    """PlanError where a sequence has in zigzag no equal chunks."""
    if zigzag and batch.sequence % (2 * ranks):
        raise PlanError(
            f"{asked_length(batch)} is not divisible by 2 × cp={ranks}, as causal attention needs "
            f"for equal work on each rank: use {lengths_that_work(batch, 2 * ranks, 2 * ranks)}, "
            "another cp or attention='ulysses'"
        )


def _cut_attention(node: fx.Node, plan: Plan, zigzag: bool) -> None:
    """The function that computes fused attention under the node's strategy."""
    ranks = plan.mesh.cp
    q, k = info(node).strategies["cp"].inputs[:2]
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
