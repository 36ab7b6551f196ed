"""Make of a mask what attention adds once, and not in each layer."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar

import torch
from torch import fx

from autopar.ir.build import call, eliminate_dead
from autopar.ir.graph import MODEL, Program, info
from autopar.plan import Plan
from autopar.rules.arguments import option

aten = torch.ops.aten


@dataclass(frozen=True)
class ShareMasks:
    """Of a mask of truth values the kernels of each attention make one of numbers, and keep it for backward: in a
    model of 32 layers, 32 of [b, 1, s, s]. Layers that read the same mask read the same numbers instead.

    Requires: masks have been read (read_masks knows truth values only). Ensures: several attentions that read one
    mask of truth values read one of 0 and −inf, broadcast where it was: what the kernels would have made.

        m = expand(seen, b, 1, s, s)    |   m = expand(where(seen, zeros([]), −inf), b, 1, s, s)
        attention(q, k, v, m)           |   attention(q, k, v, m)
        attention(q_2, k_2, v_2, m)     |   attention(q_2, k_2, v_2, m)
    """

    name: ClassVar[str] = "share_masks"

    def apply(self, program: Program, plan: Plan | None) -> Program:
        program = program.copy_blocks()
        graph = program.blocks[MODEL].graph
        readers: dict[tuple[fx.Node, torch.dtype], list[fx.Node]] = defaultdict(list)
        for node in program.blocks[MODEL].ops:
            if node.target is aten.scaled_dot_product_attention.default:
                mask = option(node, "attn_mask")
                if isinstance(mask, fx.Node) and info(mask).dtype == torch.bool:
                    readers[mask, info(node).dtype].append(node)
        for (mask, dtype), attentions in readers.items():
            if len(attentions) > 1:
                added = _added(graph, mask, dtype)
                for node in attentions:
                    node.replace_input_with(mask, added)
        eliminate_dead(graph)
        return program


def _added(graph: fx.Graph, mask: fx.Node, dtype: torch.dtype) -> fx.Node:
    """What is added to scores: 0 where the mask is true, −inf elsewhere."""
    facts = replace(info(mask), dtype=dtype)
    if mask.target is aten.expand.default:  # of what is broadcast, and then broadcast
        (seen, *sizes) = mask.args
        with graph.inserting_after(mask):
            added = call(graph, aten.expand.default, (_added(graph, seen, dtype), *sizes), facts)  # type: ignore[arg-type]
        return added
    with graph.inserting_after(mask):
        zero = call(graph, aten.zeros.default, ([],), facts, shape=(), dtype=dtype)
    with graph.inserting_after(zero):
        return call(graph, aten.where.ScalarOther, (mask, zero, -inf), facts)
