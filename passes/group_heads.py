"""Un-repeat the keys and values of attention that cp shares out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from autopar.ir.build import eliminate_dead
from autopar.ir.graph import Program, arguments, info, node_inputs
from autopar.plan.plan import Plan
from autopar.rules.arguments import option
from autopar.rules.verify import Level

aten = torch.ops.aten


@dataclass(frozen=True)
class GroupHeads:
    """Attention reads the K/V heads that its author repeats: fewer bytes travel between ranks.

    Requires: nothing. Ensures: on cp, K and V of fused attention are not repeated, but where a mask is held as a
    tensor, for which kernels of one head a query are the faster.

        k_2 = reshape(expand(unsqueeze(k, 2), [b, 2, 4, s, e]), [b, 8, s, e])   |   attention(q, k, v, enable_gqa=True)
        attention(q, k_2, v_2)                                                  |
    """

    name: ClassVar[str] = "group_heads"
    leaves: ClassVar[Level] = Level.TRACED

    def apply(self, program: Program, plan: Plan | None) -> Program:
        assert plan is not None
        if plan.mesh.cp == 1:
            return program
        program = program.copy_blocks()
        for block in program.blocks.values():
            found = [_group(node, plan) for node in block.ops]
            if any(found):
                eliminate_dead(block.graph)
        return program


def _group(node: fx.Node, plan: Plan) -> bool:
    """Whether a node is attention that now reads groups."""
    if node.target is not aten.scaled_dot_product_attention.default:
        return False
    if option(node, "attn_mask") is not None and (plan.context.name == "ulysses" or info(node).window is None):
        return False
    q, k, v = node_inputs(node)[:3]
    groups = [_unrepeated(operand) for operand in (k, v)]
    counts = {int(info(group).shape[1]) if group is not None else 0 for group in groups}
    if len(counts) > 1 or 0 in counts:
        return False
    (count,), tp = counts, plan.mesh.tp
    if count % tp and tp % count:  # tp could not share them out, as it may those that are repeated
        return False
    node.args = (q, *groups, *node.args[3:])
    node.kwargs = {**node.kwargs, "enable_gqa": True}
    return True


def _unrepeated(node: fx.Node) -> fx.Node | None:
    """x [b, g, s, e] of a node [b, h, s, e] in which each of its heads follows itself h / g times."""
    if node.target is aten.repeat_interleave.self_int:
        source, _, *dim = arguments(node)
        return source if dim == [1] else None
    if node.target is not aten.reshape.default:
        return None
    spread = arguments(node)[0]
    if spread.target is not aten.expand.default:
        return None
    single = arguments(spread)[0]
    if single.target not in (aten.unsqueeze.default, aten.reshape.default):
        return None
    source = arguments(single)[0]
    b, *heads, s, e = info(spread).shape
    shapes = (info(source).shape, info(single).shape, info(node).shape)
    if len(heads) != 2 or shapes != ((b, heads[0], s, e), (b, heads[0], 1, s, e), (b, heads[0] * heads[1], s, e)):
        return None
    return source  # type: ignore[no-any-return]
