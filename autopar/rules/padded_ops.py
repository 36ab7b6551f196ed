"""What pads at the end of each sequence do to each op: nothing to the real tokens, or PadsMatter.

The sharding rules say along which dims an op computes each index by itself: there pads stay among themselves. Where an
op mixes tokens, only this is allowed, for in it pads count for nothing:

    attention       causal, for pads come last; or under a mask that hides every pad from every real token
    sum, matmul     over values that are 0 at pads
    softmax         over scores that are −inf at pads
    cross_entropy   of targets that are ignored at pads
    cumsum          from the start of the sequence

Backward needs no rule of its own: each of these passes exactly 0 back to pads, and 0 times what is finite stays 0, up
to the parameters. So every op must be one whose values and derivatives at pads are known to be finite: those of
padded_views.py and padded_local.py, the elementwise ones of padded_finite.py, and those of the table below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..ir.custom import EXPERTS
from ..ir.graph import S, info, node_inputs
from . import RULES, has_rule, rule_of
from . import padded_tables as tables
from .arguments import is_tagged, option
from .losses import MEAN
from .padded_attention import attention, softmax
from .padded_bounds import apply
from .padded_finite import as_real, check_infinite, check_poles
from .padded_local import PLACES, RUNNING, local
from .padded_values import ANY, POSITIVE, ZERO, Interval, Padded, PadsMatter, Tokens, padded, same, unknown
from .padded_views import VIEWS, Lengths
from .pointwise import RULES as POINTWISE
from .pointwise import is_pointwise

aten = torch.ops.aten


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
        found = _OPS.get(node.target, _elementwise if _is_elementwise(node) else local)(node, operands, lengths)
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
    if is_tagged(node.target, torch.Tag.nondeterministic_seeded) and node.target is not aten.dropout.default:
        raise PadsMatter("draws random numbers, which would be others for real tokens too")
    check_poles(node, operands)
    real, whole = (apply(node, found) for found in ([x.real for x in operands], [x.whole for x in operands]))
    pads = [_at(node, operands, i) if dims[i] else real for i in places]
    drawn = node.target is aten.dropout.default
    return padded(dims, real, pads, whole, [not drawn and all(x.is_alike(i) for x in operands) for i in places])


def _at(node: fx.Node, operands: Sequence[Padded], dim: int) -> Interval:
    """The elements at pads of a dim; finite: no more of them are −inf than of those at real tokens."""
    found = apply(node, [x.at(dim) for x in operands])
    return replace(found, finite=True) if as_real(node, operands, dim, found) else found


def _classification(node: fx.Node, operands: Sequence[Padded], lengths: Lengths) -> Padded:
    """An ignored target adds 0 to the sum."""
    x, target = operands[:2]
    ignored = float(option(node, "ignore_index"))
    if option(node, "reduction") == MEAN:
        raise PadsMatter("sums over the tokens of a sequence, pads included: it divides by how many there are")
    if len(target.dims) == len(x.dims):
        raise PadsMatter("has probabilities as targets, of which none is ignored at pads")
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
    if sum(t is not None for t in dims) > 1:
        raise PadsMatter("has a target for each pair of tokens, and where two pads meet none that is ignored")
    if not info(node).shape:
        return padded([], ANY)
    return padded(dims, ANY, [ZERO] * len(dims))


def _from_the_start(node: fx.Node, operands: Sequence[Padded], lengths: Lengths) -> Padded:
    """A running sum, or the largest so far: a real token sees those before it."""
    (x,) = operands
    if any(t is not None and not t.alone for t in x.dims):
        raise PadsMatter("runs over the tokens of several samples")
    if node.target is not aten.cumsum.default:
        return padded(x.dims, unknown(node))
    if info(node).dtype.is_floating_point:
        return padded(x.dims, POSITIVE if x.whole.low >= 0 else ANY)
    dim = int(option(node, "dim")) % len(x.dims)
    size = info(node_inputs(node)[0]).shape[dim]
    first, last = lengths.first(size), lengths.whole(size)
    pads = [_total(p, first) if i != dim else _total(p, last - first, _times(x.real, first))
            for i, p in enumerate(x.pads)]  # fmt: skip
    return padded(x.dims, _total(x.real, first), pads, _total(x.whole, last))


def _times(x: Interval, count: int) -> Interval:
    return Interval(x.low * count, x.high * count)


def _total(x: Interval, count: int, before: Interval = ZERO) -> Interval:
    """Of one to `count` numbers, and of what was before."""
    low, high = min(x.low, x.low * count), max(x.high, x.high * count)
    return Interval(before.low + low, before.high + high)


_OPS: Mapping[Any, Callable[[fx.Node, Sequence[Padded], Lengths], Padded]] = {
    aten.embedding.default: tables.embedding,
    **dict.fromkeys((aten.index.Tensor, aten.index_select.default), tables.index),
    aten.gather.default: tables.gather,
    **dict.fromkeys((aten.scatter.src, aten.scatter.value, aten.scatter_add.default), tables.scatter),
    aten.one_hot.default: tables.one_hot,
    EXPERTS: tables.experts,
    **dict.fromkeys(PLACES, tables.places),
    aten.scaled_dot_product_attention.default: attention,
    **dict.fromkeys((aten.softmax.int, aten.log_softmax.int), softmax),
    **dict.fromkeys((aten.cross_entropy_loss.default, aten.nll_loss_nd.default), _classification),
    **dict.fromkeys((aten.cumsum.default, *RUNNING), _from_the_start),
}
