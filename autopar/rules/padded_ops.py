"""What pads at the end of each sequence do to each op: nothing to the real tokens, or PadsMatter.

The sharding rules say along which dims an op computes each index by itself: there pads stay among themselves. Where an
op mixes tokens, only this is allowed, for in it pads count for nothing:

    attention       causal, for pads come last; or under a mask that hides every pad from every real token
    sum, matmul     over values that are 0 at pads
    softmax         over scores that are −inf at pads
    cross_entropy   of targets that are ignored at pads
    cumsum          from the start of the sequence

Backward needs no rule, where all is finite (padded_finite.py): two functions of the parameters that are equal
everywhere have equal gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import fx

from ..ir.graph import S, info, node_inputs
from ..ir.results import RESULT_OF
from . import RULES, has_rule, rule_of
from .arguments import option
from .attention import is_causal
from .factor import Rule
from .losses import MEAN
from .matmul import RULES as MATMULS
from .padded_finite import as_real, check_infinite, check_poles
from .padded_values import ANY, ZERO, Interval, Padded, PadsMatter, Tokens, apply, padded, same, unknown
from .padded_views import VIEWS, Lengths
from .pointwise import RULES as POINTWISE
from .pointwise import is_pointwise

aten = torch.ops.aten

_HIDDEN = Interval(-inf, -inf)
_SEES_NOTHING = (
    "may hide every key from a pad, whose result is then nan: let the mask of keys be the same for all rows, or causal"
)


def result_of(node: fx.Node, operands: Sequence[Padded], lengths: Lengths) -> Padded:
    """The op's result in a padded run; PadsMatter where its real tokens may be others than without pads."""
    if not any(S in n.free_symbols for facts in (info(node), *map(info, node_inputs(node))) for n in facts.shape):
        found = _without_tokens(node, operands, lengths)
    elif not has_rule(node):
        raise PadsMatter("is an op of which no rule says whether it mixes tokens")
    elif (view := VIEWS.get(node.target)) is not None:
        found = view(node, operands, rule_of(node), lengths)
    else:
        _check_arguments((node.args, node.kwargs))
        check_infinite(node, operands)
        found = _OPS.get(node.target, _elementwise if _is_elementwise(node) else _local)(node, operands, lengths)
    for tokens, size in zip(found.dims, info(node).shape, strict=True):
        if (tokens is not None or S in size.free_symbols) and not _fits(tokens, size):
            raise PadsMatter(f"has a dim of {size} elements, of which no prefix belongs to the real tokens")
    return found


def _fits(tokens: Tokens | None, size: Any) -> bool:
    return tokens is not None and bool((tokens.outer * tokens.size * tokens.inner - size).expand() == 0)


def _without_tokens(node: fx.Node, operands: Sequence[Padded], lengths: Lengths) -> Padded:
    """An op on values that have no tokens; the length may still be among its arguments."""
    if node.target in VIEWS:
        return VIEWS[node.target](node, operands, rule_of(node), lengths)
    _check_arguments((node.args, node.kwargs))
    real = apply(node, [x.real for x in operands]) if _is_elementwise(node) else unknown(node)
    return padded([None] * len(info(node).shape), real)


def _check_arguments(argument: Any) -> None:
    if isinstance(argument, list | tuple | dict):
        for item in argument.values() if isinstance(argument, dict) else argument:
            _check_arguments(item)
    elif S in getattr(argument, "free_symbols", ()):
        raise PadsMatter("reads the length of the sequence, pads included")


def _is_elementwise(node: fx.Node) -> bool:
    return (
        node.target in POINTWISE
        and node.target is not aten.prelu.default
        or (node.target not in RULES and is_pointwise(node.target))
    )


def _elementwise(node: fx.Node, operands: Sequence[Padded], lengths: Lengths) -> Padded:
    """Dims aligned from the right."""
    rank = len(info(node).shape)
    places = range(-rank, 0)
    dims = [same([x.dims[i] for x in operands if -i <= len(x.dims)]) for i in places]
    check_poles(node, operands)
    real = apply(node, [x.real for x in operands])
    return padded(dims, real, [_at(node, operands, i) if dims[i] else real for i in places])


def _at(node: fx.Node, operands: Sequence[Padded], dim: int) -> Interval:
    """The elements at pads of a dim; finite: no more of them are −inf than of those at real tokens."""
    found = apply(node, [x.at(dim) for x in operands])
    return replace(found, finite=True) if as_real(node, operands, dim, found) else found


def _local(node: fx.Node, operands: Sequence[Padded], lengths: Lengths) -> Padded:
    """Along the dims of its rule an op computes each index by itself, or sums."""
    rule = rule_of(node)
    _check_mixing(node, operands, rule)
    least = min(i.low for x in operands for i in (x.real, *x.pads))
    real = Interval(0, inf) if node.target in _MEANS and least >= 0 else unknown(node)
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


def _embedding(node: fx.Node, operands: Sequence[Padded], lengths: Lengths) -> Padded:
    """Rows of a table: it must have those of the pads."""
    _check_rows(operands[1], int(info(node_inputs(node)[0]).shape[0]))
    return _local(node, operands, lengths)


def _check_rows(index: Padded, rows: int) -> None:
    highest = max(i.high for i in (index.real, *index.pads))
    if rows <= highest < inf:
        raise PadsMatter(f"reads row {highest:.0f} of a table that has {rows}")


def _gather(node: fx.Node, operands: Sequence[Padded], lengths: Lengths) -> Padded:
    """Read along a dim without tokens; the result has those of the index."""
    x, index = operands[:2]
    dim = int(option(node, "dim")) % len(x.dims)
    if x.dims[dim] is not None:
        raise PadsMatter("reads tokens at computed places, which may be those of pads")
    size = info(node_inputs(node)[0]).shape[dim]
    _check_rows(index, int(size) if size.is_Integer else 0)
    others = [None if i == dim else t for i, t in enumerate(x.dims)]
    return padded([same(pair) for pair in zip(others, index.dims, strict=True)], unknown(node))


def _attention(node: fx.Node, operands: Sequence[Padded], lengths: Lengths) -> Padded:
    q, k, v, *masks = operands
    rank = len(q.dims)
    outer = [same([x.dims[i] for x in operands if -i <= len(x.dims)]) for i in range(-rank, -2)]
    rows, keys = q.dims[-2], same([k.dims[-2], v.dims[-2]])
    if q.dims[-1] or k.dims[-1] or v.dims[-1]:
        raise PadsMatter("takes scores from the tokens of a sequence, pads included")
    if keys is not None and not (is_causal(node) and rows == keys and keys.alone):
        _check_hidden(node, masks, keys)
    if masks and len(masks[0].dims) > 1:
        same([rows, masks[0].dims[-2]])
    return padded([*outer, rows, None], ANY)


def _check_hidden(node: fx.Node, masks: Sequence[Padded], keys: Tokens) -> None:
    if not masks:
        raise PadsMatter(
            "attends to all tokens of a sequence, pads included: give the model an `attention_mask`, which is 0 at pads"
        )
    (mask,), facts = masks, info(node_inputs(node)[3])
    at_pads = mask.pads[-1]
    hides = ZERO if facts.dtype == torch.bool else _HIDDEN
    if same([mask.dims[-1], keys]) != mask.dims[-1]:
        raise PadsMatter("has a mask that is the same for all keys, pads included")
    if len(mask.dims) > 1 and mask.dims[-2] is not None and mask.pads[-2] == hides:
        raise PadsMatter(_SEES_NOTHING)
    if at_pads == hides:
        return
    if at_pads.high < -1e4:
        raise PadsMatter(
            f"has a mask of {at_pads.high:.3g} at pads: a token that sees no key at all would see them; make it one of "
            "truth values, or of −inf"
        )
    raise PadsMatter(
        "has a mask that need not hide the pads: make it False, or −inf, where an input `attention_mask` is 0, and "
        "give the model that input"
    )


def _softmax(node: fx.Node, operands: Sequence[Padded], lengths: Lengths) -> Padded:
    """Over tokens: a score of −inf counts for nothing, and its share is 0."""
    (x,) = operands
    dim = int(option(node, "dim")) % len(x.dims)
    if (tokens := x.dims[dim]) is None:
        if not all(p.finite for t, p in zip(x.dims, x.pads, strict=True) if t is not None):
            raise PadsMatter(_SEES_NOTHING)
        return _local(node, operands, lengths)
    if not tokens.alone or x.pads[dim] != _HIDDEN or node.target is not aten.softmax.int:
        raise PadsMatter(
            "mixes the tokens of a sequence, and the scores of pads are not −inf (a finite one, as −1e9, hides pads "
            "only where a token sees some other key)"
        )
    if any(t is not None and i != dim and not x.pads[i].finite for i, t in enumerate(x.dims)):
        raise PadsMatter(_SEES_NOTHING)
    return padded(x.dims, ANY, [ZERO if i == dim else ANY for i in range(len(x.dims))])


def _classification(node: fx.Node, operands: Sequence[Padded], lengths: Lengths) -> Padded:
    """An ignored target adds 0 to the sum."""
    x, target = operands[:2]
    ignored = float(option(node, "ignore_index"))
    if option(node, "reduction") == MEAN or len(target.dims) == len(x.dims):
        return _local(node, operands, lengths)  # a mean over all rows, or probabilities: never allowed over tokens
    classes = 1 if len(x.dims) > 1 else 0
    rows = [t for i, t in enumerate(x.dims) if i != classes]
    dims = [same(pair) for pair in zip(rows, target.dims, strict=True)]
    wrong = [p for p, t in zip(target.pads, target.dims, strict=True) if t and p.constant != ignored]
    if x.dims[classes] is not None or wrong:
        is_now = "not known" if not wrong or wrong[0].constant is None else f"{wrong[0].constant:g}"
        raise PadsMatter(
            f"has targets at pads that it does not ignore (they are {is_now}, ignore_index is {ignored:g}): give the "
            "labels as an input of their own"
        )
    if not info(node).shape:
        same(dims)  # of one sequence, not of pairs of tokens
        return padded([], ANY)
    return padded(dims, ANY, [ZERO] * len(dims))


def _from_the_start(node: fx.Node, operands: Sequence[Padded], lengths: Lengths) -> Padded:
    """A running sum and the like: a real token sees those before it."""
    (x,) = operands
    if any(t is not None and not t.alone for t in x.dims):
        raise PadsMatter("runs over the tokens of several samples")
    return padded(x.dims, unknown(node))


_COUNTS = {aten.count_nonzero.default, aten.count_nonzero.dim_IntList}
_SUMS = {aten.sum.default, aten.sum.dim_IntList, *_COUNTS, *MATMULS}
_MEANS = {aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim}  # of what is not negative: no sign
_RUNNING = {op for op, (of, _, _) in RESULT_OF.items() if of in (aten.cummax.default, aten.cummin.default)}

_OPS: Mapping[Any, Callable[[fx.Node, Sequence[Padded], Lengths], Padded]] = {
    aten.embedding.default: _embedding,
    aten.gather.default: _gather,
    aten.scaled_dot_product_attention.default: _attention,
    **dict.fromkeys((aten.softmax.int, aten.log_softmax.int), _softmax),
    **dict.fromkeys((aten.cross_entropy_loss.default, aten.nll_loss_nd.default), _classification),
    **dict.fromkeys((aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default, *_RUNNING), _from_the_start),
}
