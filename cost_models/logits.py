"""What the logits of a classification loss cost, the largest tensors of most language models (FAULTS M1).

Bytes an element of the logits on this rank: c of the compute dtype, f of the loss (fp32, or fp64 of fp64):

    form       kept for backward   most at once                       read and written forward, backward
    whole      f: log-softmax      3f: it, its gradient, theirs       2f + f, 2f + 3f (and casts)
    sharded    f: the logits       2f: they, their gradient           7f, 6f (and casts)
    chunks     0                   (f + c) / chunks; f if c = f       7f, 6f (and casts), of the recomputed ones too

`whole` is F.cross_entropy, `sharded` runtime.loss.cross_entropy, `chunks` runtime.linear_loss. A cast reads and writes
c + f. tests/numerics/test_linear_loss.py holds "most at once" against the storage that is alive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from autopar.cost_models.layer_costs import OpCost
from autopar.ir.custom import LINEAR_CROSS_ENTROPY
from autopar.ir.graph import info, node_inputs
from autopar.placement import Strategy

aten = torch.ops.aten
_ZERO = sympy.Integer(0)


@dataclass(frozen=True)
class LogitsCost:
    """Of one loss on one rank, for one micro-batch. peak_bytes includes what is kept."""

    kept_bytes: sympy.Expr
    peak_bytes: sympy.Expr
    forward_bytes: sympy.Expr
    backward_bytes: sympy.Expr


def logits_cost(node: fx.Node, strategy: Strategy, ranks: int) -> LogitsCost | None:
    """The cost of a classification loss's logits; None for other ops."""
    if node.target is LINEAR_CROSS_ENTROPY:
        return _chunked(node, strategy, ranks)
    if node.target is not aten.cross_entropy_loss.default:
        return None
    logits, lies = info(node_inputs(node)[0]), strategy.inputs[0]
    size = sympy.Mul(*logits.shape) / (ranks if lies.is_shard else 1)
    computed, of_loss = logits.dtype.itemsize, max(4, logits.dtype.itemsize)
    cast = 0 if computed == of_loss else computed + of_loss
    agreed = lies.is_shard and strategy.output.whole  # ranks agree on maximum and sum: written out op by op
    kept, peak, forward, backward = (1, 2, 7, 6) if agreed else (1, 3, 3, 5)
    kept, peak, forward, backward = (n * of_loss for n in (kept, peak, forward, backward))
    return LogitsCost(kept * size, peak * size, (forward + cast) * size, (backward + cast) * size)


def _chunked(node: fx.Node, strategy: Strategy, ranks: int) -> LogitsCost:
    x, weight = (info(n) for n in node_inputs(node)[:2])
    rows = x.shape[0] / (ranks if strategy.inputs[0].is_shard else 1)
    size = rows * weight.shape[0] / (ranks if strategy.inputs[1].is_shard else 1)
    computed, of_loss = x.dtype.itemsize, max(4, x.dtype.itemsize)
    cast = 0 if computed == of_loss else computed + of_loss
    capped = node.kwargs.get("softcap") is not None
    most = of_loss + (computed if cast else 0) + (of_loss if capped else 0)
    forward = 7 * of_loss + cast + (6 * of_loss if capped else 0)
    chunks: Any = node.kwargs["chunks"]
    return LogitsCost(
        _ZERO, most * size / chunks, forward * size,
        (6 * of_loss + cast + (16 * of_loss if capped else 0) + computed + cast) * size,
    )  # fmt: skip


def head_costs(node: fx.Node, strategy: Strategy, product: OpCost, ranks: int) -> tuple[OpCost, OpCost]:
    """A head with its loss as two costs: its products, of which backward has one more, and passes over the logits."""
    logits = _chunked(node, strategy, ranks)
    chunks: Any = node.kwargs["chunks"]
    rows, weight = info(node_inputs(node)[0]), info(node_inputs(node)[1])
    split = strategy.inputs[0].is_shard, strategy.inputs[1].is_shard
    x = sympy.Mul(*rows.shape) * rows.dtype.itemsize / (ranks if split[0] else 1)
    w = sympy.Mul(*weight.shape) * weight.dtype.itemsize / (ranks if split[1] else 1)
    z = sympy.Mul(rows.shape[0], weight.shape[0]) * rows.dtype.itemsize / (ranks if any(split) else 1)
    forward = chunks * x + w + z  # the rows are read for each slice
    summed = chunks * x * (1 + 2 * max(4, rows.dtype.itemsize) // rows.dtype.itemsize)
    backward = product.backward_flops != 0
    gradients = (z + w + summed) + (z + chunks * x + w)
    products = replace(
        product,
        forward_bytes=forward,
        backward_flops=3 * product.forward_flops if backward else _ZERO,
        backward_bytes=forward + gradients if backward else _ZERO,
        launches=(chunks, 3 * chunks),
    )
    passes = OpCost(
        f"{product.name}_logits", "memory", _ZERO, logits.forward_bytes, _ZERO,
        logits.backward_bytes if backward else _ZERO, product.sharded, (18 * chunks + 10, 15 * chunks + 5),
        product.dgrad_wgrad,
    )  # fmt: skip
    return products, passes
