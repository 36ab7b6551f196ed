"""Fused attention. The sequence of q stays whole on tp; K/V groups shard with their query heads."""

import torch

from .factor import RuleMaker, einsum

aten = torch.ops.aten

# Grouped K/V: heads h of q and groups of k, v are one factor, for q head i reads group i // (h / groups).
RULES: dict[object, RuleMaker] = {
    aten.scaled_dot_product_attention.default: einsum(
        "q[b h s e] k[b h t e] v[b h t f] m[b h s t] -> y[b h s f]",
        whole="s t e f", kind="attention", saves="q k v y",
    ),
}  # fmt: skip
