"""Embedding and cross-entropy: the ops that index a vocabulary."""

import torch
from torch import fx

from ..placement import REPLICATE, Shard, Strategy
from .factor import Rule, RuleMaker, einsum

aten = torch.ops.aten


def _cross_entropy(node: fx.Node) -> Rule:
    """Sum over rows. With the vocabulary sharded, ranks agree on maximum, sum and target logit inside the op."""
    vocabulary = Strategy((Shard(1), REPLICATE), REPLICATE)
    return Rule(
        (("n", "v"), ("n",)), (), whole=frozenset({"v"}), special=(vocabulary,), kind="memory", saves=(0,)
    )


RULES: dict[object, RuleMaker] = {
    # Sharding v: rows outside the shard count as zero, so the result is Partial.
    aten.embedding.default: einsum("w[v d] i[*b] -> y[*b d]", saves="i"),
    aten.cross_entropy_loss.default: _cross_entropy,
}
