"""Fused attention. The sequence of q stays whole on tp; K/V groups shard with their query heads."""

import torch
from torch import fx

from ..ir.graph import info, node_inputs
from ..placement import GRAD_PARTIAL, REPLICATE, Shard, Strategy
from .factor import Dims, Rule, RuleMaker

aten = torch.ops.aten


def _attention(node: fx.Node) -> Rule:
    """`q[b h s e] k[b h t e] v[b h t f] m[b h s t] -> y[b h s f]`; a dim of size 1 of the mask broadcasts.

    Grouped K/V: heads h of q and groups of k, v are one factor, for q head i reads group i // (h / groups).
    Other ranks than four stay whole.
    """
    shapes = [info(n).shape for n in node_inputs(node)]
    if any(len(shape) != 4 for shape in shapes[:3]):
        return Rule(tuple((None,) * len(shape) for shape in shapes), (None,) * len(info(node).shape))
    masks = tuple(
        tuple(None if n == 1 else dim for n, dim in zip(mask, "bhst"[4 - len(mask) :], strict=True))
        for mask in shapes[3:]
    )
    heads, groups = shapes[0][1], shapes[1][1]
    return Rule(
        (tuple("bhse"), tuple("bhte"), tuple("bhtf"), *masks),
        tuple("bhsf"),
        whole=frozenset("stef"),
        even=frozenset("h"),  # 25 heads on 2 ranks: half a head is none
        special=(_one_group(node, masks),) if groups != heads else (),
        multiple_of=int(groups) if groups != heads else 0,
        kind="attention",
        saves=(0, 1, 2, -1),
    )


def _one_group(node: fx.Node, masks: tuple[Dims, ...]) -> Strategy:
    """On more ranks than K/V heads: K and V whole, of which each rank reads the one head of its query heads."""
    operands = [info(n) for n in node_inputs(node)]
    shared = [GRAD_PARTIAL if o.requires_grad else REPLICATE for o in operands]
    masked = [Shard(m.index("h")) if "h" in m else p for m, p in zip(masks, shared[3:], strict=True)]
    return Strategy((Shard(1), *shared[1:3], *masked), Shard(1))


RULES: dict[object, RuleMaker] = {aten.scaled_dot_product_attention.default: _attention}
