"""Normalisation and softmax: the dim they reduce stays whole."""

import torch
from torch import fx

from ..ir.graph import info
from .factor import Rule, RuleMaker, einsum

aten = torch.ops.aten


def _softmax(node: fx.Node) -> Rule:
    rank = len(info(node).shape)
    dims = tuple(f"d{i}" for i in range(rank))
    return Rule((dims,), dims, whole=frozenset({dims[int(node.args[1]) % rank]}), saves=(-1,))  # type: ignore[call-overload]


RULES: dict[object, RuleMaker] = {
    aten.layer_norm.default: einsum("x[*b d] w[d] c[d] -> y[*b d]", whole="d", saves="x"),
    aten.rms_norm.default: einsum("x[*b d] w[d] -> y[*b d]", whole="d", saves="x"),
    aten.softmax.int: _softmax,
    aten.log_softmax.int: _softmax,
}
