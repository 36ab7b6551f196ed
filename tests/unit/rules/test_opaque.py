"""Modules that are kept whole: the only strategies on tp, and those of the batch on the data axis."""

from __future__ import annotations

import operator

import pytest
import sympy
import torch
from torch import fx

from autopar.ir.custom import OPAQUE
from autopar.ir.graph import B, NodeInfo, Role, S, Shape, set_info
from autopar.placement import GRAD_PARTIAL, REPLICATE, Shard, Strategy
from autopar.rules import TensorAxis, rule_of, strategies
from autopar.rules.spread import AXIS

HIDDEN: Shape = (B, S, sympy.Integer(8))


def call(samples: bool) -> tuple[fx.Node, fx.Node]:
    """opaque([x, weight]) and its second result, of a sample each."""
    graph = fx.Graph()
    x = set_info(graph.placeholder("x"), NodeInfo(HIDDEN, torch.float64, True, Role.VALUE, "0"))
    weight_shape = (sympy.Integer(8), sympy.Integer(8))
    weight = set_info(graph.placeholder("w"), NodeInfo(weight_shape, torch.float64, True, Role.PARAMETER, "w"))
    module = graph.call_function(OPAQUE, ([x, weight], "inner", 1, samples, 128))
    set_info(module, NodeInfo(HIDDEN, torch.float64, True))
    result = graph.call_function(operator.getitem, (module, 1))
    return module, set_info(result, NodeInfo((B,), torch.float64, True))


@pytest.mark.parametrize("samples", [True, False])
@pytest.mark.parametrize("sequence", [True, False])
def test_on_tp_it_is_whole_and_so_are_its_gradients(samples: bool, sequence: bool) -> None:
    axis = TensorAxis(2, {B: 4, S: 16}, sequence)
    for node in call(samples):
        (only,) = strategies(node, rule_of(node), axis)
        assert only == Strategy((REPLICATE,) * len(only.inputs), REPLICATE)


def test_on_the_data_axis_the_batch_is_a_shard_where_samples_are_treated_alone() -> None:
    module, result = call(samples=True)
    assert Strategy((Shard(0), GRAD_PARTIAL), Shard(0)) in strategies(module, rule_of(module), AXIS)
    assert Strategy((Shard(0),), Shard(0)) in strategies(result, rule_of(result), AXIS)
    for node in call(samples=False):
        assert all(not s.output.is_shard for s in strategies(node, rule_of(node), AXIS))
