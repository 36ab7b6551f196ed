"""Make of a mask what attention adds once, and not in each layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

import torch
from torch import fx

from autopar.ir.build import call, eliminate_dead
from autopar.ir.graph import MODEL, Block, Program, Role, info, node_inputs
from autopar.plan.plan import Plan
from autopar.rules.arguments import option
from autopar.rules.verify import Level
from autopar.trace.lists import LayerLists, layer_lists
from autopar.trace.repeats import REPEAT

aten = torch.ops.aten

_ATTENTION = aten.scaled_dot_product_attention.default


@dataclass(frozen=True)
class ShareMasks:
    """Of a mask of truth values the kernels of each attention make one of numbers, and keep it for backward: in a
    model of 32 layers, 32 of [b, 1, s, s]. Layers that read the same mask read the same numbers instead.

    Requires: masks have been read (read_masks knows truth values only). Ensures: several attentions that read one
    mask of truth values read one of 0 and −inf, broadcast where it was: what the kernels would have made. Only of what
    every stage makes for itself: others would send numbers with a gradient where they sent truth values. (On cp each
    layer takes its rows of them.)

        m = expand(seen, b, 1, s, s)    |   m = expand(where(seen, zeros([]), −inf), b, 1, s, s)
        attention(q, k, v, m)           |   attention(q, k, v, m)
        attention(q_2, k_2, v_2, m)     |   attention(q_2, k_2, v_2, m)
    """

    name: ClassVar[str] = "share_masks"
    leaves: ClassVar[Level] = Level.TRACED

    def apply(self, program: Program, plan: Plan | None) -> Program:
        program = program.copy_blocks()
        block = program.blocks[MODEL]
        lists = layer_lists({name: facts.shape for name, facts in program.parameters.items()})
        made: dict[fx.Node, fx.Node] = {}
        for mask in list(_tables(block, lists)):
            readers = [n for n in mask.users if n.target is _ATTENTION and option(n, "attn_mask") is mask]
            if len(readers) > 1 and len({info(n).dtype for n in readers}) == 1:
                added = _added(mask, info(readers[0]).dtype, made)
                for node in (*readers, *(n for n in mask.users if n.target is REPEAT)):
                    node.replace_input_with(mask, added)
        eliminate_dead(block.graph)
        return program


def _tables(block: Block, lists: LayerLists) -> Iterator[fx.Node]:
    """Truth values that depend on no parameter and are made outside of layers."""
    outside: set[fx.Node] = set()
    for node in block.nodes:
        if node.op == "placeholder":
            is_outside = info(node).role in (Role.INPUT, Role.BUFFER)
        else:
            is_outside = lists.layer(info(node).module) is None and outside.issuperset(node_inputs(node))
        if is_outside:
            outside.add(node)
            if info(node).dtype == torch.bool:
                yield node


def _added(mask: fx.Node, dtype: torch.dtype, made: dict[fx.Node, fx.Node]) -> fx.Node:
    """What is added to scores: 0 where the mask is true, −inf elsewhere."""
    if mask in made and info(made[mask]).dtype == dtype:
        return made[mask]
    graph, facts = mask.graph, replace(info(mask), dtype=dtype)
    if mask.target is aten.expand.default:  # of what is broadcast, and then broadcast
        (seen, *sizes) = mask.args
        assert isinstance(seen, fx.Node)
        source = _added(seen, dtype, made)
        with graph.inserting_after(mask):
            made[mask] = call(graph, aten.expand.default, (source, *sizes), facts)
        return made[mask]
    with graph.inserting_after(mask):
        zero = call(graph, aten.zeros.default, ([],), facts, shape=(), dtype=dtype)
    with graph.inserting_after(zero):
        made[mask] = call(graph, aten.where.ScalarOther, (mask, zero, -inf), facts)
    return made[mask]
