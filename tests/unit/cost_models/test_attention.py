"""Pairs of attention over a cut sequence, against the tiles that the runtime computes."""

from __future__ import annotations

from itertools import product

import pytest
import sympy
import torch
from torch import fx

from autopar.cost_models.op_costs import needed_share, pairs
from autopar.ir.graph import NodeInfo, S, set_info
from autopar.ir.ops import gathered_attention, ring_attention
from autopar.runtime.tiles import Layout, ring_tiles, whole_tiles
from tests.tiles import area

ROWS = 256
CASES = [
    (cp, zigzag, window) for cp, zigzag, window in product((2, 4), (False, True), (None, 1, 64, 200, 300, 511, 2000))
]


def attention(target: object, **options: object) -> fx.Node:
    node = fx.Graph().create_node("call_function", ring_attention)
    node.target, node.kwargs = target, options  # type: ignore[assignment]
    return node


@pytest.mark.parametrize(("cp", "zigzag", "window"), CASES)
def test_the_busiest_rank_is_priced(cp: int, zigzag: bool, window: int | None) -> None:
    layout = Layout(cp, ROWS, ROWS, True, zigzag, window)
    of_ring = [sum(area(t) for block in range(cp) for t in ring_tiles(layout, r, block)) for r in range(cp)]
    of_all = [sum(area(tile) for tile in whole_tiles(layout, rank)) for rank in range(cp)]
    options = {"is_causal": True, "zigzag": zigzag, "window": window}
    for target, counted in ((ring_attention, of_ring), (gathered_attention, of_all)):
        price = pairs(attention(target, ranks=cp, **options), S, cp * S).subs(S, ROWS)
        assert float(price) == pytest.approx(max(counted), rel=0.01, abs=ROWS / 2)  # of the diagonal, a half


def test_without_a_window_the_price_is_a_half_in_zigzag() -> None:
    node = attention(ring_attention, ranks=4, is_causal=True, zigzag=True)
    assert pairs(node, S, S) == 2 * S**2
    assert pairs(attention(ring_attention, ranks=4, is_causal=False, zigzag=False), S, S) == 4 * S**2


@pytest.mark.parametrize("window", [1, 5, 31, 32, 99])
def test_what_a_window_needs_of_all_pairs(window: int) -> None:
    """A kernel that is given the mask computes all of them."""
    facts = NodeInfo((sympy.Integer(2), sympy.Integer(4), S, sympy.Integer(8)), torch.float32, window=window)
    share = float(needed_share(set_info(attention(ring_attention), facts)).subs(S, 32))
    assert share == pytest.approx(sum(min(window, row + 1) for row in range(32)) / 32**2, abs=1 / 64)
