"""Reading and writing at computed places: along dims without tokens, and at pads too at places that there are."""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf

import sympy
import torch
from torch import fx

from ..ir.graph import Role, info, node_inputs
from .arguments import option
from .padded_local import local
from .padded_values import Interval, Padded, PadsMatter, padded, same, unknown
from .padded_views import VIEWS, Lengths, moved, reshaped, selected, sliced

aten = torch.ops.aten

_COMPUTED = "reads tokens at computed places, which may be those of pads"


def embedding(node: fx.Node, operands: Sequence[Padded], lengths: Lengths) -> Padded:
    """Rows of a table, by numbers."""
    _check_rows(node_inputs(node)[1], operands[1], info(node_inputs(node)[0]).shape[0])
    return local(node, operands, lengths)


def index(node: fx.Node, operands: Sequence[Padded], lengths: Lengths) -> Padded:
    """Elements of a table, by the numbers of one or several of its dims."""
    table, *others = operands
    if any(table.dims):
        raise PadsMatter(_COMPUTED)
    given = option(node, "indices") or [*[None] * (int(option(node, "dim")) % len(table.dims)), option(node, "index")]
    pairs = [(n, size) for n, size in zip(given, info(node_inputs(node)[0]).shape, strict=False) if n is not None]
    for (index, size), typed in zip(pairs, others, strict=True):
        _check_rows(index, typed, size)
    return local(node, operands, lengths)


def gather(node: fx.Node, operands: Sequence[Padded], lengths: Lengths) -> Padded:
    """Read along a dim without tokens; the result has those of the index."""
    x, index = operands[:2]
    dim = _dim_of(node, operands, 1)
    others = [None if i == dim else t for i, t in enumerate(x.dims)]
    if any(i != dim and t is not None and x.dims[i] is None for i, t in enumerate(index.dims)):
        raise PadsMatter(_COMPUTED)
    return padded([same(pair) for pair in zip(others, index.dims, strict=True)], unknown(node))


def scatter(node: fx.Node, operands: Sequence[Padded], lengths: Lengths) -> Padded:
    """Written along a dim without tokens."""
    _dim_of(node, operands, 1)
    return local(node, operands, lengths)


def _dim_of(node: fx.Node, operands: Sequence[Padded], place: int) -> int:
    """The dim along which an operand has the places of another, which it must have at pads too."""
    x, index = operands[0], operands[place]
    dim = int(option(node, "dim")) % len(x.dims)
    if x.dims[dim] is not None:
        raise PadsMatter(_COMPUTED)
    _check_rows(node_inputs(node)[place], index, info(node_inputs(node)[0]).shape[dim])
    return dim


def one_hot(node: fx.Node, operands: Sequence[Padded], lengths: Lengths) -> Padded:
    _check_rows(node_inputs(node)[0], operands[0], info(node).shape[-1])
    return local(node, operands, lengths)


def experts(node: fx.Node, operands: Sequence[Padded], lengths: Lengths) -> Padded:
    """Each token by the experts that its router chose, among those that there are."""
    _check_rows(node_inputs(node)[1], operands[1], info(node_inputs(node)[3]).shape[0])
    return local(node, operands, lengths)


def places(node: fx.Node, operands: Sequence[Padded], lengths: Lengths) -> Padded:
    """Where along a dim without tokens its largest, smallest, … elements are."""
    found, dim = local(node, operands, lengths), option(node, "dim", -1)
    size = info(node_inputs(node)[0]).shape[int(dim)]
    return padded(found.dims, Interval(0, float(size) - 1)) if size.is_Integer and found.dims else found


def _check_rows(index: fx.Node, typed: Padded, rows: sympy.Expr) -> None:
    """PadsMatter where pads may read or write beyond a table; a buffer of rows is taken to name rows that exist."""
    at = [pads for tokens, pads in zip(typed.dims, typed.pads, strict=True) if tokens is not None]
    found = [*at, typed.whole] if len(at) > 1 else at
    if found and not rows.is_Integer:
        raise PadsMatter("takes rows of a table that has as many as there are samples or tokens")
    if all(i.low >= 0 and i.high < rows for i in found) or _of_buffers(index):
        return
    least, most = min(i.low for i in found), max(i.high for i in found)
    if most >= rows and not isinf(most):
        raise PadsMatter(f"reads row {most:.0f} of a table that has {rows}, for pads have positions too")
    raise PadsMatter(
        f"takes rows {least:.0f} to {most:.0f} of a table that has {rows}, as far as is known: clamp the numbers, or "
        "give them as an input"
    )


def _of_buffers(node: fx.Node) -> bool:
    """Whether numbers are moved out of the model's buffers, whose own rows were checked."""
    if node.op == "placeholder":
        return info(node).role is Role.BUFFER
    moves = node.target is aten.gather.default or VIEWS.get(node.target) in (moved, reshaped, sliced, selected)
    return moves and _of_buffers(node_inputs(node)[0])
