"""The source of every op that has a rule computes what the op computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autopar.emit.expressions import expression
from autopar.emit.text import Text
from autopar.ir.results import RESULTS
from tests.numerics import loss_cases, op_cases, rule_cases
from tests.numerics.rule_cases import Case, node_of

aten = torch.ops.aten
CASES: dict[Any, list[Case]] = {**rule_cases.CASES, **op_cases.CASES, **op_cases.TAGGED, **loss_cases.CASES}
# What is random, unset, or a call of the runtime's.
OTHERS = {"dropout", "empty", "empty_like", "new_empty", "experts", "batch_norm", "linear_cross_entropy"}
# Ops that a person would not write by these names, and which no model of the zoo has.
LONG = {
    "upsample_trilinear3d", "index", "hardtanh", "celu", "elu", "softshrink", "threshold", "linalg_vector_norm",
    "channel_shuffle", "isin", "cross_entropy_loss",
}  # fmt: skip


def source_of(node: fx.Node) -> str:
    return expression(node, lambda n: Text(n.name), '"cpu"', "True").source


def evaluate(source: str, operands: list[Tensor]) -> Any:
    return eval(source, {"torch": torch, "F": F, **{f"x{i}": t for i, t in enumerate(operands)}})


@pytest.mark.parametrize("target", [t for t in CASES if t.overloadpacket.__name__ not in OTHERS], ids=str)
def test_the_source_computes_the_op(target: Any) -> None:
    for case in CASES[target]:
        node = node_of(target, case)
        source = source_of(node)
        with torch.no_grad():
            operands = case.draw()
            expected = target(*rule_cases._fill(case.args, iter(operands)), **case.kwargs)
            found = evaluate(source, operands)
        assert found.dtype == expected.dtype or node.target is aten.alias.default, source
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=source)


@pytest.mark.parametrize("target", [t for t in CASES if t.overloadpacket.__name__ not in OTHERS | LONG], ids=str)
def test_the_source_has_public_names(target: Any) -> None:
    for case in CASES[target]:
        source = source_of(node_of(target, case))
        assert "torch.ops" not in source or "alpha" in source or case.kwargs, source


def test_results_are_read_by_name() -> None:
    values, _ = RESULTS[aten.topk.default]
    assert source_of(node_of(values, Case((rule_cases.f(4, 6), 2)))) == "x0.topk(2).values"
    _, mean = RESULTS[aten.var_mean.correction]
    assert source_of(node_of(mean, Case((rule_cases.f(4, 6), [1])))) == "torch.var_mean(x0, (1,))[1]"


def test_a_convolution_writes_equal_strides_once() -> None:
    case = Case((rule_cases.f(1, 3, 8, 8), rule_cases.f(4, 3, 3, 3), rule_cases.f(4), [2, 2], [1, 1]))
    assert source_of(node_of(aten.conv2d.default, case)) == "F.conv2d(x0, x1, x2, stride=2, padding=1)"
