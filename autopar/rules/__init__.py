"""The sharding rule of every op, looked up by node."""

from __future__ import annotations

from torch import fx

from ..ir.graph import info, node_inputs
from . import attention, experts, lookup, losses, matmul, norms, pointwise, views
from .factor import Axis, Rule, RuleMaker, strategies

RULES: dict[object, RuleMaker] = {
    **matmul.RULES,
    **attention.RULES,
    **experts.RULES,
    **norms.RULES,
    **lookup.RULES,
    **losses.RULES,
    **views.RULES,
    **pointwise.RULES,
}


def rule_of(node: fx.Node) -> Rule:
    """The rule of an op; an op without one must stay whole on every axis."""
    if node.target in RULES:
        return RULES[node.target](node)
    inputs = tuple((None,) * len(info(n).shape) for n in node_inputs(node))
    return Rule(inputs, (None,) * len(info(node).shape))


def has_rule(node: fx.Node) -> bool:
    return node.target in RULES


__all__ = ["RULES", "Axis", "Rule", "has_rule", "rule_of", "strategies"]
