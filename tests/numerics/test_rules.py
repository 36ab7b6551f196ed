"""Every rule, every strategy: ranks as a loop, forward and backward, against the unsharded op in float64.

Inserting and verifying share the rules, so this is what tests the rules themselves.
"""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.placement import REPLICATE, Kind
from autopar.rules import RULES, TensorAxis, rule_of, strategies
from tests.numerics import loss_cases, op_cases, rule_cases
from tests.numerics.rule_cases import Case, Operand, check, node_of

aten = torch.ops.aten
CASES = {**rule_cases.CASES, **op_cases.CASES, **op_cases.TAGGED, **loss_cases.CASES}
CASES[aten.cross_entropy_loss.default] += loss_cases.CROSS_ENTROPY
WHOLE_ONLY = rule_cases.WHOLE_ONLY | op_cases.WHOLE_ONLY
SIZES = (2, 3)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("target", CASES, ids=str)
def test_every_strategy_computes_what_the_op_computes(target: Any, size: int) -> None:
    for case in CASES[target]:
        check(target, case, size)


def test_every_rule_has_a_case() -> None:
    missing = sorted(str(target) for target in RULES.keys() - CASES.keys())
    assert not missing, f"add cases to rule_cases.CASES for {missing}"


@pytest.mark.parametrize("target", CASES, ids=str)
def test_every_rule_is_tried_in_pieces(target: Any) -> None:
    """At least one strategy of the cases of each op is sharded or Partial, but for ops that have none."""
    tried = {
        placement.kind
        for case in CASES[target]
        for size in SIZES
        for strategy in _strategies(target, case, size)
        for placement in (*strategy.inputs, strategy.output)
    }
    assert bool(tried & {Kind.SHARD, Kind.PARTIAL}) == (target not in WHOLE_ONLY)


def _strategies(target: Any, case: Case, size: int) -> list[Any]:
    node = node_of(target, case)
    return strategies(node, rule_of(node), TensorAxis(size, sequence=True))


# --------------------------------------------------------------------------------
# Shapes that nobody thought of

few = settings(
    max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
dims = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@few
@given(st.data(), st.sampled_from([2, 3]))
def test_reshapes_of_any_shape(data: st.DataObject, size: int) -> None:
    """Sizes are cut from one list of small factors, so that dims merge, split and regroup."""
    factors = data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5))
    shapes = []
    for _ in range(2):
        cuts = sorted(data.draw(st.sets(st.integers(0, len(factors)), max_size=4)) | {0, len(factors)})
        shapes.append([prod(factors[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)])
    check(aten.reshape.default, Case((Operand(tuple(shapes[0])), shapes[1])), size)


@few
@given(dims, st.data(), st.sampled_from([2, 3]))
def test_elementwise_ops_broadcast_as_torch_does(shape: list[int], data: st.DataObject, size: int) -> None:
    other = [1 if data.draw(st.booleans()) else n for n in shape][data.draw(st.integers(0, len(shape) - 1)) :]
    target = data.draw(st.sampled_from([aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default]))
    operands = (Operand(tuple(shape)), Operand(tuple(other)))
    check(target, Case(operands if data.draw(st.booleans()) else operands[::-1]), size)


@few
@given(dims, st.integers(1, 5), st.integers(1, 5), st.data(), st.sampled_from([2, 3]))
def test_products_of_any_shape(batch: list[int], k: int, n: int, data: st.DataObject, size: int) -> None:
    x = Operand((*batch, k))
    if data.draw(st.booleans()):
        check(aten.linear.default, Case((x, Operand((n, k)))), size)
        return
    leading = [1 if data.draw(st.booleans()) else m for m in batch[:-1]][data.draw(st.integers(0, len(batch) - 1)) :]
    check(aten.matmul.default, Case((x, Operand((*leading, k, n)))), size)


@few
@given(dims, st.data(), st.sampled_from([2, 3]))
def test_reductions_over_any_dims(shape: list[int], data: st.DataObject, size: int) -> None:
    over = data.draw(st.lists(st.sampled_from(range(-len(shape), len(shape))), min_size=1, max_size=2))
    over = list({d % len(shape): d for d in over}.values())
    target = data.draw(st.sampled_from([aten.sum.dim_IntList, aten.mean.dim, aten.amax.default]))
    check(target, Case((Operand(tuple(shape)), over, data.draw(st.booleans()))), size)


# --------------------------------------------------------------------------------
# What a rule must not offer


@pytest.mark.parametrize(
    ("target", "case"),
    [
        (aten.mul.Tensor, Case((Operand((4, 6)), Operand((4, 6))))),
        (aten.matmul.default, Case((Operand((4, 6)), Operand((6, 4))))),
    ],
)
def test_a_product_of_two_partials_is_not_offered(target: Any, case: Case) -> None:
    for strategy in _strategies(target, case, 2):
        assert [p.kind for p in strategy.inputs].count(Kind.PARTIAL) < 2


def test_a_sum_of_a_partial_and_a_whole_value_is_not_offered() -> None:
    for strategy in _strategies(aten.add.Tensor, Case((Operand((4, 6)), Operand((6,)))), 2):
        kinds = {p.kind for p in strategy.inputs}
        assert Kind.PARTIAL not in kinds or kinds == {Kind.PARTIAL}


def test_an_op_without_a_rule_stays_whole() -> None:
    node = node_of(aten.cdist.default, Case((Operand((4, 6)), Operand((4, 6)))))
    assert {p for s in strategies(node, rule_of(node), TensorAxis(2)) for p in s.inputs if p.is_shard} == set()
    assert strategies(node, rule_of(node), TensorAxis(2))[0].output == REPLICATE
