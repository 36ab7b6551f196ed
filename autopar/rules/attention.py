"""Fused attention. The sequence of q stays whole on tp; K/V groups shard with their query heads.

On cp the queries of a rank are a part of the sequence: they meet all keys, gathered, or sent around in a ring.
"""

from collections.abc import Mapping
from dataclasses import replace

import sympy
import torch
from torch import fx

from ..ir.graph import Program, S, info, node_inputs
from ..ir.ops import gathered_attention, ring_attention
from ..placement import GRAD_PARTIAL, REPLICATE, Shard, Strategy
from .arguments import option
from .axes import ContextAxis
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
        special={"tp": (_one_group(node, masks),) if groups != heads else (), "cp": _over_sequence(node, masks)},
        multiple_of=int(groups) if groups != heads else 0,
        kind="attention",
        saves=(0, 1, 2, *kept_masks(node, made=False), -1),
    )


def kept_masks(node: fx.Node, made: bool) -> tuple[int, ...]:
    """Positions of the masks that are added as they are; made: of those of truth values, of each of which the kernel
    makes one of numbers, in the dtype of the result, and keeps that."""
    return tuple(i for i, mask in enumerate(node_inputs(node)[3:], 3) if (info(mask).dtype == torch.bool) == made)


def _one_group(node: fx.Node, masks: tuple[Dims, ...]) -> Strategy:
    """On more ranks than K/V heads: K and V whole, of which each rank reads the one head of its query heads."""
    operands = [info(n) for n in node_inputs(node)]
    shared = [GRAD_PARTIAL if o.requires_grad else REPLICATE for o in operands]
    masked = [Shard(m.index("h")) if "h" in m else p for m, p in zip(masks, shared[3:], strict=True)]
    return Strategy((Shard(1), *shared[1:3], *masked), Shard(1))


def _over_sequence(node: fx.Node, masks: tuple[Dims, ...]) -> tuple[Strategy, ...]:
    """Ring attention (K and V sharded as q is) where no mask is in the way; K and V whole, each rank its rows of q.

    A mask that only says what a window says is not in the way, and not read. Ranks would draw other masks of dropout
    than one device: none of the two with dropout.
    """
    q, k, *_ = (info(n) for n in node_inputs(node))
    if option(node, "dropout_p") or is_causal(node) and q.shape[2] != k.shape[2]:
        return ()
    whole = [GRAD_PARTIAL if info(n).requires_grad else REPLICATE for n in node_inputs(node)]
    unread = whole[3:]
    gathered = Strategy((Shard(2), *whole[1:3], *unread), Shard(2))
    ring = Strategy((*(Shard(2),) * 3, *unread), Shard(2))
    if not masks or info(node).window is not None:
        return ring, gathered
    rows = [Shard(m.index("s")) if "s" in m else p for m, p in zip(masks, unread, strict=True)]
    return (replace(gathered, inputs=(*gathered.inputs[:3], *rows)),)


def context_axis(program: Program, ranks: int, values: Mapping[sympy.Symbol, int], layout: str, tp: int) -> ContextAxis:
    """The axis cp under a layout. Only Ulysses shards more than the sequence: in others its order may be zigzag."""
    parts = 2 * ranks if is_zigzag(program, layout, ranks, values[S]) else ranks
    return ContextAxis(ranks, values, parts, heads=layout == "ulysses", inner=tp)


def is_zigzag(program: Program, layout: str, ranks: int, sequence: int) -> bool:
    """Whether a layout of cp cuts sequences in zigzag: where that makes some causal attention faster, no heads cut."""
    ops = (node for _, node in program.each_op())
    return layout in ("ring", "all_gather") and any(
        node.target in _FUSED and is_causal(node) and not is_short(info(node).window, ranks, sequence) for node in ops
    )


def is_short(window: int | None, ranks: int, sequence: int) -> bool:
    """Whether even in zigzag some rank has only rows that see a whole window: the last one, with those in the middle.

    Then its work is that of the busiest rank in order, where a ring can end once the window is passed.
    """
    return window is not None and 2 * ranks * window <= (ranks - 1) * sequence


def is_causal(node: fx.Node) -> bool:
    """Whether each query meets only the keys up to its own position, all of them or a window of the last."""
    return bool(option(node, "is_causal")) or info(node).window is not None


_FUSED = {aten.scaled_dot_product_attention.default}
RULES: dict[object, RuleMaker] = dict.fromkeys(_FUSED, _attention)

# On a rank of cp, where q is a part of the sequence.
OVER_SEQUENCE: dict[object, RuleMaker] = {ring_attention: _attention, gathered_attention: _attention}
