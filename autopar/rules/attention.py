"""Fused attention. The sequence of q stays whole on tp; K/V groups shard with their query heads."""

import torch
from torch import fx

from ..ir.graph import info, node_inputs
from .factor import Rule, RuleMaker

aten = torch.ops.aten


def _attention(node: fx.Node) -> Rule:
    """`q[b h s e] k[b h t e] v[b h t f] m[b h s t] -> y[b h s f]`; a dim of size 1 of the mask broadcasts.

    Grouped K/V: heads h of q and groups of k, v are one factor, for q head i reads group i // (h / groups).
    Other ranks than four stay whole.
    """
    shapes = [info(n).shape for n in node_inputs(node)]
    if any(len(shape) != 4 for shape in shapes[:3]):
        return Rule(tuple((None,) * len(shape) for shape in shapes), (None,) * len(info(node).shape))
    masks = (
        tuple(None if n == 1 else dim for n, dim in zip(mask, "bhst"[4 - len(mask) :], strict=True))
        for mask in shapes[3:]
    )
    return Rule(
        (tuple("bhse"), tuple("bhte"), tuple("bhtf"), *masks),
        tuple("bhsf"),
        whole=frozenset("stef"),
        even=frozenset("h"),  # 25 heads on 2 ranks: half a head is none
        kind="attention",
        saves=(0, 1, 2, -1),
    )


RULES: dict[object, RuleMaker] = {aten.scaled_dot_product_attention.default: _attention}
