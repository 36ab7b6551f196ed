"""Read masks of attention that hide nothing or are causal, whatever the length of the sequence."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from autopar.ir.build import call, eliminate_dead, replace_node
from autopar.ir.graph import MODEL, Program, info, node_inputs, update_info
from autopar.ir.masks import causal_mask, hides_nothing
from autopar.plan.plan import Plan
from autopar.rules.arguments import option
from autopar.rules.verify import Level

aten = torch.ops.aten

_BOTH = (aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default)
_CHOICES = (aten.where.self, aten.where.ScalarOther)
_VIEWS = (aten.expand.default, aten.reshape.default, aten.alias.default, aten.to.dtype)


@dataclass(frozen=True)
class ReadMasks:
    """A mask that is proven to hide or add nothing, or to be plain causal, goes, and so does a choice by one that is
    true everywhere; one with a sliding window besides is known by its window.

    Requires: a clean program. Ensures: attention with `window` in its facts sees the last `window` keys up to its own
    position, which is all that its mask says; the mask stays, for plans that leave the sequence whole.

        attention(q, k, v, ge(i, 0))                     |   attention(q, k, v, None)
        attention(q, k, v, where(ge(i, 0), bias, −inf))  |   attention(q, k, v, bias)
        where(m, zeros([1, 16, s, s]), −inf)             |   expand(where(m, zeros([]), −inf), [b, 16, s, s])
        attention(q, k, v, le(j, i))                     |   attention(q, k, v, None, 0.0, True)
        m = and(le(j, i), gt(j, sub(i, 5)))              |   m = …
        attention(q, k, v, m)                            |   attention(q, k, v, m)  # window=5
    """

    name: ClassVar[str] = "read_masks"
    leaves: ClassVar[Level] = Level.TRACED

    def apply(self, program: Program, plan: Plan | None) -> Program:
        program = program.copy_blocks()
        graph = program.blocks[MODEL].graph
        for node in list(graph.nodes):
            if node.target in _BOTH:
                _drop_true(node)
            elif node.target in _CHOICES:
                _choose(node)
            elif node.target is aten.scaled_dot_product_attention.default:
                _read(node)
        eliminate_dead(graph)
        return program


def _read(node: fx.Node) -> None:
    mask, (q, k) = option(node, "attn_mask"), node.args[:2]
    if mask is None or option(node, "is_causal"):
        return
    rows, keys = info(q).shape[-2], info(k).shape[-2]  # type: ignore[arg-type]
    found = causal_mask(mask, rows, keys)
    if found is not None and found.window is not None:
        update_info(node, window=found.window)
    elif found is not None:
        _unmask(node, is_causal=True)
    elif hides_nothing(mask, rows, keys) or _adds_nothing(mask):
        _unmask(node, is_causal=False)


def _drop_true(node: fx.Node) -> None:
    """and(true everywhere, mask) → mask, broadcast to the result; integers are not read as truth values by it."""
    for one, other in itertools.permutations(node_inputs(node)):
        if info(other).dtype == torch.bool and _is_true(one, node):
            _replace(node, other)
            return


def _choose(node: fx.Node) -> None:
    """where(true everywhere, x, other) → x; where(mask, zeros of another shape, number) → where(mask, 0, number)."""
    mask, first, other = node.args
    if not isinstance(mask, fx.Node) or not isinstance(first, fx.Node) or info(first).dtype != info(node).dtype:
        return
    if _is_true(mask, node):
        if not (isinstance(other, fx.Node) and info(other).requires_grad):  # whose gradients are zeros, and no None
            _replace(node, first)
    elif _adds_nothing(first) and info(first).shape != () and not isinstance(other, fx.Node):
        graph, facts = node.graph, info(node)
        with graph.inserting_before(node):
            zero = call(graph, aten.zeros.default, ([],), facts, shape=(), dtype=facts.dtype)
            chosen = call(graph, aten.where.ScalarOther, (mask, zero, other), facts, shape=info(mask).shape)
        _replace(node, chosen)


def _is_true(mask: fx.Node, node: fx.Node) -> bool:
    """Whether a mask that is broadcast to a node's shape is true everywhere."""
    shape = info(node).shape
    return len(shape) > 1 and info(mask).dtype == torch.bool and hides_nothing(mask, shape[-2], shape[-1])


def _replace(node: fx.Node, value: fx.Node) -> None:
    """Every reader of `node` reads `value`, broadcast to the node's shape."""
    if info(value).shape != info(node).shape:
        with node.graph.inserting_before(node):
            value = call(node.graph, aten.expand.default, (value, list(info(node).shape)), info(node))
    replace_node(node, value)


def _adds_nothing(mask: fx.Node) -> bool:
    """Whether a mask of numbers is zero everywhere."""
    while mask.target in _VIEWS:
        mask = node_inputs(mask)[0]
    return mask.target is aten.zeros.default and info(mask).dtype.is_floating_point


def _unmask(node: fx.Node, is_causal: bool) -> None:
    node.args = (*node.args[:3], None, option(node, "dropout_p"), is_causal)
    node.kwargs = {name: value for name, value in node.kwargs.items() if name in ("scale", "enable_gqa")}
