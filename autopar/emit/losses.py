"""Losses as calls of torch.nn.functional: options by name, the reduction in words."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..ir.custom import LINEAR_CROSS_ENTROPY
from ..ir.graph import info, node_inputs
from .op import Op
from .text import Text, size_text

aten = torch.ops.aten

REDUCTIONS = ("none", "mean", "sum")


def _loss(name: str, count: int = 2) -> Callable[[Op], Text]:
    """A loss of `count` operands."""

    def write(op: Op) -> Text:
        operands = [op.shown(argument.name) for argument in op.schema[:count]]
        reduction = REDUCTIONS[op.take("reduction", 1)]
        options = [f"{option}={op.shown(option)}" for option in list(op.left)]
        options += [f'reduction="{reduction}"'] if reduction != "mean" else []
        return Text(f"F.{name}({', '.join([*operands, *options])})")

    return write


def _linear_cross_entropy(op: Op) -> Text:
    """The runtime's function; with the vocabulary over tp also its size and axis."""
    given = [op.shown(name) for name in ("x", "weight", "target")]
    given += [
        f"{name}={op.shown(name)}" for name in ("bias", "chunks", "scale", "softcap", "ignore_index") if name in op.left
    ]
    if op.splits(1, 0):
        given.append(f'size={size_text(info(node_inputs(op.node)[1]).shape[0])}, axis="tp"')
    return Text(f"linear_cross_entropy({', '.join(given)})", imports=frozenset({"linear_loss.linear_cross_entropy"}))


LOSSES = {
    LINEAR_CROSS_ENTROPY: _linear_cross_entropy,
    aten.nll_loss_nd.default: _loss("nll_loss"),
    **{
        getattr(aten, name).default: _loss(name)
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div",
                     "binary_cross_entropy_with_logits", "soft_margin_loss", "hinge_embedding_loss", "poisson_nll_loss")
    },
    **{
        getattr(aten, name).default: _loss(name, 3)
        for name in ("cosine_embedding_loss", "margin_ranking_loss", "triplet_margin_loss")
    },
}  # fmt: skip
