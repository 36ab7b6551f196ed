"""The sharding rule of every op, looked up by node."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..ir.graph import info, node_inputs
from . import (
    attention,
    experts,
    factories,
    indexing,
    losses,
    matmul,
    norms,
    opaque,
    pointwise,
    reductions,
    views,
    vision,
)
from .factor import Axis, Rule, RuleMaker, strategies

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
    **pointwise.RULES,
}


# Their targets are no single ops to be tried on tensors: tests/unit/rules/test_opaque.py does.
_OPAQUE = opaque.RULES


def rule_of(node: fx.Node) -> Rule:
    """The rule of an op; an op without one must stay whole on every axis."""
    if (maker := _maker(node.target)) is not None:
        return maker(node)
    inputs = tuple((None,) * len(info(n).shape) for n in node_inputs(node))
    return Rule(inputs, (None,) * len(info(node).shape))


def has_rule(node: fx.Node) -> bool:
    return _maker(node.target) is not None


def _maker(target: Any) -> RuleMaker | None:
    """By op, else by what torch says of the op: elementwise, or a reduction."""
    if target in RULES or target in _OPAQUE:
        return RULES.get(target) or _OPAQUE[target]
    if pointwise.is_pointwise(target):
        return pointwise.pointwise
    return reductions.reduction if reductions.is_reduction(target) else None


__all__ = ["RULES", "Axis", "Rule", "has_rule", "rule_of", "strategies"]
