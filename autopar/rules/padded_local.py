"""The ops that pads may pass because each index, or sum of zeros, is by itself: those whose values and derivatives are
finite for any finite operands, or under a condition that is checked. What is not listed here, in padded_views.py,
padded_finite.py or the table of padded_ops.py is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..ir.custom import EXPERTS
from ..ir.results import RESULT_OF
from . import rule_of
from .arguments import option
from .factor import Rule
from .losses import NONE
from .matmul import RULES as MATMULS
from .padded_finite import check_epsilon
from .padded_values import POSITIVE, ZERO, Padded, PadsMatter, Tokens, padded, same, unknown
from .padded_views import Lengths

aten = torch.ops.aten


def _results(*of: Any) -> dict[Any, str]:
    return {op: name for op, (target, _, name) in RESULT_OF.items() if target in of}


_COUNTS = {aten.count_nonzero.default, aten.count_nonzero.dim_IntList}
_SUMS = {aten.sum.default, aten.sum.dim_IntList, *_COUNTS, *MATMULS}
_MEANS = {aten.mean.default, aten.mean.dim}
_NOT_NEGATIVE = {aten.sum.default, aten.sum.dim_IntList, *_MEANS}  # of what is not negative
RUNNING = set(_results(aten.cummax.default, aten.cummin.default))

_CHOSEN = _results(aten.topk.default, aten.sort.default, aten.sort.stable, aten.max.dim, aten.min.dim)
PLACES = {
    *(op for op, name in _CHOSEN.items() if name == "indices"),
    aten.argsort.default, aten.argsort.stable, aten.argmax.default, aten.argmin.default,
}  # fmt: skip

_TERMS = {
    aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
    aten.binary_cross_entropy_with_logits.default,
}  # fmt: skip
_NORM = aten.linalg_vector_norm.default
_CONDITIONS: Mapping[Any, Callable[[fx.Node], None]] = {
    **dict.fromkeys((aten.layer_norm.default, aten.rms_norm.default), check_epsilon),
    **dict.fromkeys(_TERMS, lambda node: _check_option(node, "reduction", NONE)),
    _NORM: lambda node: _check_option(node, "ord", 2),  # of others the derivative at 0 is none, or a choice
}
_LOCAL = {
    *_SUMS, *_MEANS, *_CHOSEN, *PLACES, *_CONDITIONS, *_results(aten.var_mean.correction, aten.var_mean.dim), EXPERTS,
    aten.var.correction, aten.var.dim, aten.amax.default, aten.amin.default, aten.any.dim, aten.all.dim,
    aten.logsumexp.default, aten.softmax.int, aten.log_softmax.int, aten.prelu.default, aten.embedding.default,
    aten.index.Tensor, aten.index_select.default, aten.one_hot.default, aten.scatter.src, aten.scatter.value,
    aten.scatter_add.default, aten.stack.default, aten.repeat_interleave.self_int,
    aten.flip.default, aten.roll.default, aten.select_scatter.default, aten.slice_scatter.default,
    aten.conv1d.default, aten.conv1d.padding, aten.conv2d.default, aten.conv2d.padding,
}  # fmt: skip


def _check_allowed(node: fx.Node) -> None:
    """PadsMatter where an op of _LOCAL may have no finite value or derivative at pads, or is not in it."""
    if node.target not in _LOCAL:
        raise PadsMatter(
            "is an op of which it is not known that at pads its values and gradients are finite: write it out in sums, "
            "products and roots, with an epsilon in what divides"
        )
    if (check := _CONDITIONS.get(node.target)) is not None:
        check(node)


def _check_option(node: fx.Node, name: str, value: float) -> None:
    if (given := option(node, name)) != value:
        raise PadsMatter(f"is an op that may be padded only with {name}={value}, and has {name}={given}")


def local(node: fx.Node, operands: Sequence[Padded], lengths: Lengths) -> Padded:
    """Along the dims of its rule an op computes each index by itself, or sums."""
    rule = rule_of(node)
    _check_mixing(node, operands, rule)
    _check_allowed(node)
    least = min(x.whole.low for x in operands)
    real = POSITIVE if node.target in _NOT_NEGATIVE and least >= 0 else unknown(node)
    return padded(_dims(operands, rule), real)


def _dims(operands: Sequence[Padded], rule: Rule) -> list[Tokens | None]:
    def of(factor: str | None) -> list[Tokens | None]:
        pairs = [
            (f, t) for x, dims in zip(operands, rule.inputs, strict=True) for f, t in zip(dims, x.dims, strict=True)
        ]
        return [tokens for f, tokens in pairs if f == factor is not None]

    for factor in set(rule.factors) - set(rule.output):
        same(of(factor))
    return [same(of(factor)) for factor in rule.output]


def _check_mixing(node: fx.Node, operands: Sequence[Padded], rule: Rule) -> None:
    """Every dim with tokens passes, but for one that is summed over zeros."""
    pairs = [(f, t, p) for x, dims in zip(operands, rule.inputs, strict=True)
             for f, t, p in zip(dims, x.dims, x.pads, strict=True)]  # fmt: skip
    mixed = {f for f, tokens, _ in pairs if tokens is not None and not (f in rule.output and f not in rule.whole)}
    if not mixed:
        return
    if len(mixed) > 1 or None in mixed or mixed & rule.whole and node.target not in _COUNTS:
        raise PadsMatter("mixes the tokens of a sequence, pads included")
    if node.target not in _SUMS:
        raise PadsMatter(
            "sums over the tokens of a sequence, pads included: multiply its terms by a mask, and sum them"
        )
    if all(pads != ZERO for f, _, pads in pairs if f in mixed):
        raise PadsMatter("sums over the tokens of a sequence, and at pads what it sums is not 0")
