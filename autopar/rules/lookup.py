"""Embedding and cross-entropy: the ops that index a vocabulary."""

from dataclasses import replace

import torch
from torch import fx

from ..ir.graph import info, node_inputs
from ..placement import REPLICATE, Shard, Strategy
from .factor import Rule, RuleMaker, einsum

aten = torch.ops.aten


_rows = einsum("w[v d] i[*b] -> y[*b d]", saves="i")


def _embedding(node: fx.Node) -> Rule:
    """Sharding v: rows outside the shard count as zero, so the result is Partial.

    Gradients scaled by how often a row occurs in the batch (scale_grad_by_freq) need the whole batch.
    """
    rule = _rows(node)
    return replace(rule, whole=frozenset(rule.factors)) if len(node.args) > 3 and node.args[3] else rule


_SUM = 2  # at::Reduction


def _cross_entropy(node: fx.Node) -> Rule:
    """Sum over rows. With the vocabulary sharded, ranks agree on maximum, sum and target logit inside the op.

    Any other reduction, class weights and more than two dims stay whole.
    """
    shapes = [info(n).shape for n in node_inputs(node)]
    reduction = node.args[3] if len(node.args) > 3 else 1
    if reduction != _SUM or len(shapes) != 2 or len(shapes[0]) != 2:
        whole = tuple((None,) * len(shape) for shape in shapes)
        return Rule(whole, (None,) * len(info(node).shape), saves=(0,))
    vocabulary = Strategy((Shard(1), REPLICATE), REPLICATE)
    return Rule((("n", "v"), ("n",)), (), whole=frozenset({"v"}), special=(vocabulary,), kind="memory", saves=(0,))


RULES: dict[object, RuleMaker] = {
    aten.embedding.default: _embedding,
    aten.cross_entropy_loss.default: _cross_entropy,
}
