"""Conversions over cp as ops on tp, and the factors of a sequence in rows."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from autopar.ir.graph import B, NodeInfo, Program, Role, S, set_info
from autopar.ir.ops import COLLECTIVES, convert
from autopar.placement import GRAD_PARTIAL, PARTIAL, REPLICATE, Shard, Strategy
from autopar.rules import Axis, ContextAxis, TensorAxis, rule_of, strategies
from autopar.rules.attention import context_axis

aten = torch.ops.aten
VALUES = {B: 2, S: 8}
NOTHING = Program("Model", {}, (), {}, {}, {})  # without a causal attention: no zigzag
TP = TensorAxis(2, VALUES, True)


def op(target: Any, source: tuple[Any, ...], result: tuple[Any, ...], *arguments: Any, **kwargs: Any) -> fx.Node:
    """An op on one value with a gradient, of these shapes."""
    graph = fx.Graph()
    shapes = [tuple(map(sympy.sympify, shape)) for shape in (source, result)]
    value = set_info(graph.placeholder("x"), NodeInfo(shapes[0], torch.float64, True, Role.VALUE, "0"))
    return set_info(graph.call_function(target, (value, *arguments), kwargs), NodeInfo(shapes[1], torch.float64, True))


def outputs(node: fx.Node, axis: Axis) -> set[str]:
    return {str(s.output) for s in strategies(node, rule_of(node), axis)}


def test_the_sequence_that_ranks_exchange_is_whole_on_tp() -> None:
    node = op(convert, (B, 4, S, 8), (B, 4, 2 * S, 8), "S(2)", "Rp", "cp")
    assert outputs(node, TP) == {"R", "Rp", "S(1)", "S(3)", "P"}
    lowered = op(COLLECTIVES["all_gather"], (B, S, 8), (B, 2 * S, 8), 1, axis="cp")
    assert outputs(lowered, TP) == {"R", "Rp", "S(2)", "P"}


def test_heads_that_ranks_exchange_are_a_shard_on_tp() -> None:
    """Each rank of tp deals its own out: else heads of one rank would meet keys of others."""
    node = op(convert, (B, 4, S, 8), (B, 2, 2 * S, 8), "S(2)", "S(1)", "cp")
    assert strategies(node, rule_of(node), TP) == [Strategy((Shard(1),), Shard(1))]
    odd = op(convert, (B, 2, S, 8), (B, 1, 2 * S, 8), "S(2)", "S(1)", "cp")
    assert strategies(odd, rule_of(odd), TP) == []


def test_a_sum_over_ranks_moves_no_dim() -> None:
    node = op(convert, (B, S, 8), (B, S, 8), "P", "R", "cp")
    assert outputs(node, TP) == {"R", "Rp", "S(1)", "S(2)", "P"}


def test_rows_are_cut_by_their_sequence_on_cp_alone() -> None:
    cp = context_axis(NOTHING, 2, VALUES, "ring", 1)
    merged = op(aten.reshape.default, (B, S, 8), (B * S, 8), [B * S, 8])
    assert Strategy((Shard(1),), Shard(0)) in strategies(merged, rule_of(merged), cp)
    assert Strategy((Shard(1),), Shard(0)) not in strategies(merged, rule_of(merged), TP)
    apart = op(aten.reshape.default, (B * S, 8), (B, S, 8), [B, S, 8])
    assert Strategy((Shard(0),), Shard(1)) in strategies(apart, rule_of(apart), cp)
    assert not cp.even(B * S) and cp.even(S)  # no collective runs by rows


def test_parts_of_a_zigzag_are_halves_of_a_rank() -> None:
    cp = ContextAxis(2, VALUES, parts=4)
    assert cp.offers([S]) and cp.even(S)
    assert not cp.offers([S + 2]) and not cp.even(S + 2)  # 10 rows in 4 chunks
    assert not cp.offers([sympy.Integer(2), 2 * S])  # a dim of 2 that is joined with the sequence is no sequence


def attention(heads: int, groups: int) -> fx.Node:
    graph = fx.Graph()
    shapes = [tuple(map(sympy.sympify, (B, n, S, 8))) for n in (heads, groups, groups)]
    values = [
        set_info(graph.placeholder(name), NodeInfo(shape, torch.float64, True, Role.VALUE, str(i)))
        for i, (name, shape) in enumerate(zip("qkv", shapes, strict=True))
    ]
    node = graph.call_function(aten.scaled_dot_product_attention.default, (*values, None, 0.0, True))
    return set_info(node, NodeInfo(shapes[0], torch.float64, True))


def test_one_head_for_several_ranks_is_for_tp_alone() -> None:
    """On cp nothing in the emitted program would take the head that a rank's queries read."""
    one_head = Strategy((Shard(1), GRAD_PARTIAL, GRAD_PARTIAL), Shard(1))
    node, cp = attention(8, 2), context_axis(NOTHING, 4, VALUES, "ulysses", 1)
    assert one_head in strategies(node, rule_of(node), TensorAxis(4, VALUES))
    assert one_head not in strategies(node, rule_of(node), cp)


def test_a_table_is_cut_by_rows_on_tp_alone() -> None:
    rows, ids = (
        set_info(fx.Graph().placeholder(name), NodeInfo(tuple(map(sympy.sympify, shape)), dtype, grad, Role.VALUE, "0"))
        for name, shape, dtype, grad in (("w", (8, 4), torch.float64, True), ("i", (B, S), torch.int64, False))
    )
    node = fx.Graph().call_function(aten.embedding.default, (rows, ids))
    set_info(node, NodeInfo((B, S, sympy.Integer(4)), torch.float64, True))
    by_rows = Strategy((Shard(0), REPLICATE), PARTIAL)
    assert by_rows in strategies(node, rule_of(node), TP)
    assert by_rows not in strategies(node, rule_of(node), context_axis(NOTHING, 2, VALUES, "ulysses", 1))


def test_what_cp_offers() -> None:
    ring, ulysses = context_axis(NOTHING, 2, VALUES, "ring", 1), context_axis(NOTHING, 2, VALUES, "ulysses", 2)
    eight, six = sympy.Integer(8), sympy.Integer(6)
    assert not ring.offers([eight]) and ulysses.offers([eight])
    assert not ulysses.offers([six])  # 3 heads are not to be shared by tp's two
    assert ring.offers([S]) and ring.offers([B * S]) and not ring.offers([B])
    assert (ring.loss, TP.loss) == (PARTIAL, REPLICATE) and GRAD_PARTIAL != REPLICATE


def test_draws_are_whole_on_cp() -> None:
    """Its ranks draw alike: parts of merged rows would have the same numbers."""
    cp = context_axis(NOTHING, 2, VALUES, "ring", 1)
    for shape in ((B, S, 8), (B * S, 8)):
        assert outputs(op(aten.bernoulli.default, shape, shape), cp) == {"R", "Rp"}
