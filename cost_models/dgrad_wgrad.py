"""A backward in two halves, the gradients of inputs and later those of weights: what each takes, what is kept."""

from __future__ import annotations

import torch
from torch import fx

from autopar.ir.custom import LINEAR_CROSS_ENTROPY
from autopar.ir.graph import Role, info, node_inputs
from autopar.rules import Rule

aten = torch.ops.aten
_ADDS = (aten.add.Tensor, aten.sub.Tensor)  # their gradient is that of the result, or a sum of it
_PRODUCTS = ("matmul", "experts", "opaque")


def dgrad_wgrad(node: fx.Node, rule: Rule) -> tuple[float, float]:
    """What the gradients of inputs and those of weights take of an op's backward, when they come apart.

    A product has a matmul for each; the kernels of norms, factors and a head with its loss run twice.
    """
    graded = [n for n in node_inputs(node) if info(n).requires_grad]
    own = [n for n in graded if _is_weight(n)]
    if not own:
        return 1.0, 0.0
    if len(own) == len(graded):
        return 0.0, 1.0
    once = (rule.kind in _PRODUCTS or node.target in _ADDS) and node.target is not LINEAR_CROSS_ENTROPY
    return (0.5, 0.5) if once else (1.0, 1.0)


def keeps_gradient(node: fx.Node, rule: Rule) -> bool:
    """Whether the gradient of an op's result is kept until the second half; a sum's is that of what it adds."""
    return info(node).requires_grad and node.target not in _ADDS and all(dgrad_wgrad(node, rule))


def _is_weight(node: fx.Node) -> bool:
    """Whether a value is made of parameters alone."""
    if node.op == "placeholder":
        return info(node).role is Role.PARAMETER
    return bool(node_inputs(node)) and all(map(_is_weight, node_inputs(node)))
