"""Attention in a padded run, fused and written out: no real token sees a pad, and each pad sees what real ones do."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import fx

from ..ir.graph import info, node_inputs
from .arguments import option
from .attention import is_causal
from .padded_local import local
from .padded_values import ANY, TRUTH, ZERO, Interval, Padded, PadsMatter, Tokens, padded, same
from .padded_views import Lengths

aten = torch.ops.aten

_HIDDEN, _SEEN = Interval(-inf, -inf), Interval(1, 1)
_SEES_NOTHING = (
    "may hide every key from a pad, whose result is then nan: let the mask of keys be the same for all rows, or causal"
)


def attention(node: fx.Node, operands: Sequence[Padded], lengths: Lengths) -> Padded:
    q, k, v, *masks = operands
    rank = len(q.dims)
    outer = [same([x.dims[i] for x in operands if -i <= len(x.dims)]) for i in range(-rank, -2)]
    rows, keys = q.dims[-2], same([k.dims[-2], v.dims[-2]])
    if q.dims[-1] or k.dims[-1] or v.dims[-1]:
        raise PadsMatter("takes scores from the tokens of a sequence, pads included")
    if is_causal(node) and rows == keys and (keys is None or keys.alone):
        return padded([*outer, rows, None], ANY)  # each row sees itself
    if keys is not None:
        _check_hidden(node, masks, keys)
    if masks and len(masks[0].dims) > 1:
        same([rows, masks[0].dims[-2]])
        _check_seen(node, masks[0])
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


def _check_seen(node: fx.Node, mask: Padded) -> None:
    """Rows at pads see a key that is a real token, if real rows do: what kernels make of others is their own affair."""
    truths = info(node_inputs(node)[3]).dtype == torch.bool
    if not mask.is_alike(-2) and not (mask.pads[-2] == _SEEN if truths else mask.pads[-2].finite):
        raise PadsMatter(_SEES_NOTHING)


def _of_pairs(x: Padded) -> bool:
    """Whether −inf may be where two pads meet."""
    return sum(t is not None for t in x.dims) > 1 and not x.whole.finite


def softmax(node: fx.Node, operands: Sequence[Padded], lengths: Lengths) -> Padded:
    """Over tokens: a score of −inf counts for nothing, and its share is 0."""
    (x,) = operands
    dim = int(option(node, "dim")) % len(x.dims)
    if (tokens := x.dims[dim]) is None:
        if not all(p.finite for t, p in zip(x.dims, x.pads, strict=True) if t is not None) or _of_pairs(x):
            raise PadsMatter(_SEES_NOTHING)
        if node.target is aten.log_softmax.int and not (x.real.finite and x.whole.finite):
            raise PadsMatter("makes −inf of −inf, which 0 at pads makes nan: take the softmax")
        return padded(local(node, operands, lengths).dims, ANY if node.target is aten.log_softmax.int else TRUTH)
    if not tokens.alone or x.pads[dim] != _HIDDEN or node.target is not aten.softmax.int:
        raise PadsMatter(
            "mixes the tokens of a sequence, and the scores of pads are not −inf (a finite one, as −1e9, hides pads "
            "only where a token sees some other key)"
        )
    if any(t is not None and i != dim and not x.pads[i].finite for i, t in enumerate(x.dims)):
        raise PadsMatter(_SEES_NOTHING)
    return padded(x.dims, TRUTH, [ZERO if i == dim else TRUTH for i in range(len(x.dims))])
