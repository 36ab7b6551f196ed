"""The sharding rule of every op, looked up by node."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..ir.graph import B, Shape, info, node_inputs
from . import (
    attention,
    complex,
    custom,
    experts,
    factories,
    indexing,
    losses,
    matmul,
    norms,
    pointwise,
    random,
    reductions,
    views,
    vision,
)
from .axes import Axis, ContextAxis, TensorAxis
from .batchwise import is_batchwise
from .data_axis import DataAxis
from .factor import Dims, Rule, RuleMaker, strategies

RULES: dict[object, RuleMaker] = {
    **matmul.RULES,
    **attention.RULES,
    **experts.RULES,
    **norms.RULES,
    **indexing.RULES,
    **losses.RULES,
    **views.RULES,
    **vision.RULES,
    **reductions.RULES,
    **factories.RULES,
    **complex.RULES,
    **pointwise.RULES,
}


# Their targets are no single ops to be tried on tensors: tests/unit/rules and tests/distributed/test_context.py do.
_OTHERS = {**custom.RULES, **attention.OVER_SEQUENCE}


def rule_of(node: fx.Node) -> Rule:
    """The rule of an op; one that is not known stays whole on tp, and passes the batch where a trial showed that."""
    if (maker := _maker(node.target)) is not None:
        return maker(node)
    batch = is_batchwise(node)
    inputs = tuple(_unknown(info(n).shape, batch) for n in node_inputs(node))
    return Rule(inputs, _unknown(info(node).shape, batch))


def _unknown(shape: Shape, batch: bool) -> Dims:
    return tuple("b" if batch and i == 0 and n == B else None for i, n in enumerate(shape))


def is_known(node: fx.Node) -> bool:
    """Whether an op has a rule of its own or of a category."""
    return _maker(node.target) is not None


def has_rule(node: fx.Node) -> bool:
    """Whether it is known how an op may be sharded, by a rule or by trial."""
    return is_known(node) or is_batchwise(node)


def _maker(target: Any) -> RuleMaker | None:
    """By op, else by what torch says of the op: that it draws numbers, is elementwise, or a reduction."""
    if target in RULES or target in _OTHERS:
        return RULES.get(target) or _OTHERS[target]
    if random.draws(target):
        return random.drawn
    if pointwise.is_pointwise(target):
        return pointwise.pointwise
    return reductions.reduction if reductions.is_reduction(target) else None


AXES: dict[str, type[Axis]] = {axis.name: axis for axis in (TensorAxis, ContextAxis, DataAxis)}

__all__ = [
    "AXES",
    "RULES",
    "Axis",
    "ContextAxis",
    "DataAxis",
    "Rule",
    "TensorAxis",
    "has_rule",
    "is_known",
    "rule_of",
    "strategies",
]
