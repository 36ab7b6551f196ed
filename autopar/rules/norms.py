"""Normalisation and softmax: the dim they reduce stays whole."""

import torch
from torch import fx

from ..ir.graph import info, node_inputs
from .arguments import option
from .factor import Rule, RuleMaker

aten = torch.ops.aten


def _softmax(node: fx.Node) -> Rule:
    rank = len(info(node).shape)
    dims = tuple(f"d{i}" for i in range(rank))
    return Rule((dims,), dims, whole=frozenset({dims[int(node.args[1]) % rank]}), saves=(-1,))  # type: ignore[arg-type]


def _norm(node: fx.Node) -> Rule:
    """`x[*b *d] w[*d] c[*d] -> y[*b *d]`: the normalised dims d, an argument, stay whole."""
    x, *weights = node_inputs(node)
    rank, count = len(info(x).shape), len(node.args[1])  # type: ignore[arg-type]
    dims = tuple(f"d{i}" for i in range(rank))
    normal = dims[rank - count :]
    return Rule((dims, *(normal for _ in weights)), dims, whole=frozenset(normal), saves=(0,))


def _batch_norm(node: fx.Node) -> Rule:
    """`x[b c *d] w[c] -> y[b c *d]`, unless it takes its statistics from its samples: whole then, also the channels,
    for each rank updates the running statistics. (On dp the op itself sums them: see `is_batch_statistic`.)"""
    x, *others = node_inputs(node)
    rank = len(info(x).shape)
    dims = tuple("c" if i == 1 else f"d{i}" for i in range(rank))
    whole = frozenset(dims) if option(node, "training") else frozenset()
    return Rule((dims, *(("c",) for _ in others)), dims, whole=whole, saves=(0,))


def _instance_norm(node: fx.Node) -> Rule:
    """`x[b c *d] w[c] -> y[b c *d]`: statistics of each channel of each sample."""
    x, *others = node_inputs(node)
    rank = len(info(x).shape)
    dims = tuple("c" if i == 1 else f"d{i}" for i in range(rank))
    whole = frozenset(dims[2:]) | ({"d0"} if option(node, "running_mean") is not None else set())
    return Rule((dims, *(("c",) for _ in others)), dims, whole=whole, saves=(0,))


RULES: dict[object, RuleMaker] = {
    aten.layer_norm.default: _norm,
    aten.rms_norm.default: _norm,
    aten.batch_norm.default: _batch_norm,
    aten.instance_norm.default: _instance_norm,
    aten.softmax.int: _softmax,
    aten.log_softmax.int: _softmax,
}
