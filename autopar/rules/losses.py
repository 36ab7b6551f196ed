"""Losses: a term for each element or row, then a reduction of the terms."""

from __future__ import annotations

from dataclasses import replace

import sympy
import torch
from torch import fx

from ..ir.custom import LINEAR_CROSS_ENTROPY
from ..ir.graph import Shape, info, node_inputs
from ..placement import GRAD_PARTIAL, REPLICATE, Shard, Strategy
from .arguments import option
from .factor import Dims, Rule, RuleMaker, aligned

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2  # at::Reduction


def terms(node: fx.Node) -> Shape:
    """The shape of a loss before its reduction: one term for each element, or for each row."""
    shapes = [info(n).shape for n in node_inputs(node)]
    if node.target in _CLASSIFICATION:
        return (*shapes[0][:1], *shapes[0][2:])
    return _rows(shapes)[:-1] if node.target in _BY_ROW else _broadcast(shapes)


def _rows(shapes: list[Shape]) -> Shape:
    """The shape of the operands that have features; others have a number for each row."""
    rank = max(map(len, shapes))
    return _broadcast([shape for shape in shapes if len(shape) == rank])


def _broadcast(shapes: list[Shape]) -> Shape:
    rank = max(map(len, shapes))
    padded = [(sympy.Integer(1),) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((n for n in sizes if n != 1), sizes[0]) for sizes in zip(*padded, strict=True))


def _reduced(rule: Rule, reduction: int) -> Rule:
    """A sum of shards is a summand of the sum; a mean of them is no such thing."""
    if reduction == NONE:
        return rule
    return replace(rule, output=(), whole=frozenset(rule.factors) if reduction == MEAN else rule.whole)


def _elementwise(node: fx.Node) -> Rule:
    """One term for each element, operands broadcast."""
    shapes = [info(n).shape for n in node_inputs(node)]
    whole = _broadcast(shapes)
    inputs = tuple(aligned(shape, whole) for shape in shapes)
    return _reduced(Rule(inputs, aligned(whole, whole), saves=(0, 1)), option(node, "reduction"))


def _by_row(node: fx.Node) -> Rule:
    """One term for each row, whose features stay whole."""
    shapes = [info(n).shape for n in node_inputs(node)]
    whole = _rows(shapes)
    inputs = tuple(aligned(shape, whole if len(shape) == len(whole) else whole[:-1]) for shape in shapes)
    features = f"d{len(whole) - 1}"
    rule = Rule(inputs, aligned(whole[:-1], whole[:-1]), whole=frozenset({features}), saves=(0, 1))
    return _reduced(rule, option(node, "reduction"))


def _classification(node: fx.Node) -> Rule:
    """`x[n v *d] t[n *d] w[v] -> y[n *d]`; targets may be probabilities, `t[n v *d]`.

    With the vocabulary sharded, ranks agree on maximum, sum and target logit inside the op: only the plain sum
    over rows does that.
    """
    logits, target, *weight = node_inputs(node)
    rank = len(info(logits).shape)
    inner = tuple(f"d{i}" for i in range(rank - 2))
    probabilities = info(target).dtype.is_floating_point
    inputs: tuple[Dims, ...] = (("n", "v", *inner), ("n", "v", *inner) if probabilities else ("n", *inner))
    inputs += tuple(("v",) for _ in weight)
    rule = Rule(inputs, ("n", *inner), whole=frozenset({"v"}), saves=(0,))
    rule = _reduced(rule, option(node, "reduction"))
    plain = node.target is aten.cross_entropy_loss.default and not (weight or probabilities or inner)
    if plain and option(node, "reduction") == SUM and not option(node, "label_smoothing"):
        rule = replace(rule, special={"tp": (Strategy((Shard(1), REPLICATE), REPLICATE),)})
    return rule


def _linear_cross_entropy(node: fx.Node) -> Rule:
    """`x[n d] w[v d] t[n] bias[v] -> y[]`, with the vocabulary whole or sharded as in `_classification`."""
    x, _, _, *bias = node_inputs(node)
    rule = Rule(
        (("n", "d"), ("v", "d"), ("n",), *(("v",) for _ in bias)), (), frozenset("vd"), kind="matmul", saves=(0, 1)
    )
    shards = (GRAD_PARTIAL if info(x).requires_grad else REPLICATE, Shard(0), REPLICATE, *(Shard(0) for _ in bias))
    return replace(rule, special={"tp": (Strategy(shards, REPLICATE),)})


def _similarity(node: fx.Node) -> Rule:
    """cosine_similarity: one number for each row of `dim`, which stays whole."""
    shapes = [info(n).shape for n in node_inputs(node)]
    whole = _broadcast(shapes)
    dims, gone = aligned(whole, whole), option(node, "dim") % len(whole)
    inputs = tuple(aligned(shape, whole) for shape in shapes)
    return Rule(inputs, (*dims[:gone], *dims[gone + 1 :]), whole=frozenset({f"d{gone}"}), saves=(0, 1))


_CLASSIFICATION = {aten.cross_entropy_loss.default, aten.nll_loss_nd.default}
_BY_ROW = {aten.triplet_margin_loss.default, aten.cosine_embedding_loss.default}

RULES: dict[object, RuleMaker] = {
    **dict.fromkeys(_CLASSIFICATION, _classification),
    **dict.fromkeys(_BY_ROW, _by_row),
    aten.cosine_similarity.default: _similarity,
    LINEAR_CROSS_ENTROPY: _linear_cross_entropy,
    **dict.fromkeys(
        (aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
         aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default, aten.kl_div.default,
         aten.soft_margin_loss.default, aten.margin_ranking_loss.default, aten.hinge_embedding_loss.default,
         aten.poisson_nll_loss.default),
        _elementwise,
    ),
}  # fmt: skip


def is_raised_loss(node: fx.Node) -> bool:
    """Whether an op is a loss that half-precision programs compute in fp32; one of slices of logits does so inside."""
    return node.target in RULES and node.target is not LINEAR_CROSS_ENTROPY
