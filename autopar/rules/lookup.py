"""Embedding: the op that indexes a vocabulary."""

from dataclasses import replace

import torch
from torch import fx

from .factor import Rule, RuleMaker, einsum

aten = torch.ops.aten


_rows = einsum("w[v d] i[*b] -> y[*b d]", saves="i")


def _embedding(node: fx.Node) -> Rule:
    """Sharding v: rows outside the shard count as zero, so the result is Partial.

    Gradients scaled by how often a row occurs in the batch (scale_grad_by_freq) need the whole batch.
    """
    rule = _rows(node)
    return replace(rule, whole=frozenset(rule.factors)) if len(node.args) > 3 and node.args[3] else rule


RULES: dict[object, RuleMaker] = {
    aten.embedding.default: _embedding,
}
