"""How many pairs of a query and a key attention computes, on the rank that has most of them."""

from __future__ import annotations

import sympy
from torch import fx

from autopar.ir.graph import info
from autopar.ir.ops import gathered_attention, ring_attention
from autopar.rules.arguments import option


def pairs(node: fx.Node, rows: sympy.Expr, keys: sympy.Expr) -> sympy.Expr:
    """Pairs of a head of one sample; `rows`, `keys` at hand. A mask held as a tensor saves no kernel any.

    On cp, the busiest rank has the last rows where sequences are cut in order, and those in the middle in zigzag.
    """
    if node.target is ring_attention:
        keys = int(option(node, "ranks")) * rows
    if not option(node, "is_causal"):
        return rows * keys
    if node.target not in (ring_attention, gathered_attention):
        return rows * keys / 2
    last = (keys + rows) / 2 if option(node, "zigzag") else keys
    window = option(node, "window")
    return sympy.expand(_seen_before(last, window) - _seen_before(last - rows, window))


def needed_share(node: fx.Node) -> sympy.Expr:
    """The share of its pairs that attention needs whose mask is only a sliding window."""
    facts = info(node)
    if facts.window is None:
        return sympy.Integer(1)
    rows = facts.shape[-2]
    return _seen_before(rows, facts.window) / rows**2


def _seen_before(row: sympy.Expr, window: int | None) -> sympy.Expr:
    """Pairs of the rows before this one under a causal mask: as many keys as the row's position, `window` at most."""
    short = row if window is None else sympy.Min(row, window)
    return short**2 / 2 + (0 if window is None else window * (row - short))
