"""Calls of the losses, under each reduction: the terms themselves, their mean, their sum."""

from __future__ import annotations

from typing import Any

import torch

from autopar.ir.custom import LINEAR_CROSS_ENTROPY
from autopar.rules.losses import MEAN, NONE, SUM
from tests.numerics.rule_cases import Case, Operand, c, f, ids

aten = torch.ops.aten


def u(*shape: int) -> Operand:
    """Probabilities."""
    return Operand(shape, "fraction")


def _reduced(*calls: tuple[Any, ...], **kwargs: Any) -> list[Case]:
    """Each call with each reduction; those that differ in layout only as a sum."""
    first, *others = calls
    cases = [Case(first, {**kwargs, "reduction": reduction}) for reduction in (NONE, MEAN, SUM)]
    return cases + [Case(call, {**kwargs, "reduction": reduction}) for call in others for reduction in (NONE, SUM)]


_PAIRS = (f(12, 4), f(12, 4)), (f(4, 6, 5), c(6, 5)), (f(12, 5), c(12, 1)), (f(12), f(12))

CASES: dict[object, list[Case]] = {
    aten.mse_loss.default: _reduced(*_PAIRS),
    aten.l1_loss.default: _reduced(*_PAIRS),
    aten.smooth_l1_loss.default: _reduced(*_PAIRS, beta=0.5),
    aten.huber_loss.default: _reduced(*_PAIRS, delta=0.5),
    aten.binary_cross_entropy.default: _reduced(
        (u(12, 4), u(12, 4)), (u(4, 6), u(4, 6), c(6)), (u(12), u(12), c(12)),
    ),
    aten.binary_cross_entropy_with_logits.default: _reduced(
        (f(12, 4), c(12, 4)), (f(4, 6), c(4, 6), None, c(6)), (f(12, 4), c(12, 4), c(4), c(12, 4)),
    ),
    aten.kl_div.default: _reduced((f(12, 4), u(12, 4)), (f(4, 6, 5), u(4, 6, 5)))
    + _reduced((f(12, 4), f(12, 4)), log_target=True),
    aten.soft_margin_loss.default: _reduced((f(12, 4), c(12, 4)), (f(12), c(12))),
    aten.margin_ranking_loss.default: _reduced((f(12, 4), f(12, 4), c(12, 4), 0.2), (f(12), f(12), c(12))),
    aten.hinge_embedding_loss.default: _reduced((f(12, 4), Operand((12, 4), "side")), (f(12), Operand((12,), "side"))),
    aten.poisson_nll_loss.default: [
        Case((f(*shape), Operand(shape, "scale"), True, full, 1e-8, reduction))
        for shape in ((12, 4), (4, 6))
        for full, reduction in ((True, NONE), (False, MEAN), (True, SUM))
    ],
    aten.triplet_margin_loss.default: _reduced((f(12, 6), f(12, 6), f(12, 6)), (f(4, 12), f(4, 12), f(4, 12), 5.0))
    + _reduced((f(12, 6), f(12, 6), f(12, 6)), swap=True),
    aten.cosine_embedding_loss.default: _reduced((f(12, 6), f(12, 6), Operand((12,), "side"), 0.1)),
    aten.cosine_similarity.default: [
        Case((f(12, 4, 6), f(12, 4, 6), -1)), Case((f(12, 4), c(12, 4), 0)), Case((f(12, 4, 6), f(4, 6), 2)),
    ],
    LINEAR_CROSS_ENTROPY: [
        Case((f(12, 6), f(24, 6), ids(24, 12)), {"chunks": 3}),
        Case((f(4, 6), f(13, 6), ids(13, 4), f(13)), {"chunks": 2, "ignore_index": 3}),
        Case((f(7, 5), c(5, 5), ids(5, 7)), {"chunks": 2, "scale": 0.5, "softcap": 3.0}),
        Case((c(12, 6), f(24, 6), ids(24, 12), c(24)), {"chunks": 5}),
    ],
    aten.nll_loss_nd.default: [
        Case((f(12, 24), ids(24, 12), None, reduction, 3)) for reduction in (NONE, MEAN, SUM)
    ] + [
        Case((f(4, 12, 5), ids(12, 4, 5), None, SUM)), Case((f(12, 24), ids(24, 12), c(24), SUM)),
    ],
}  # fmt: skip

# Cross-entropy beyond the token losses: smoothing, weights, probabilities for targets.
CROSS_ENTROPY: list[Case] = [
    Case((f(12, 6), ids(6, 12), None, SUM, -100, 0.1)),
    Case((f(12, 6), ids(6, 12), None, MEAN)),
    Case((f(12, 6), u(12, 6), None, SUM)),
    Case((f(12, 6), u(12, 6), c(6), NONE, -100, 0.1)),
    Case((f(12, 6, 5), u(12, 6, 5), None, SUM)),
]
