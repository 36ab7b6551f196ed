"""Views and constants of a padded run: where the tokens come to lie, and what is read of them.

Pads come last. So a prefix of the sequence is the same with and without them, its last token is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import sympy
import torch
from torch import fx

from ..ir.graph import S, info, node_inputs
from .arguments import option
from .factor import Rule
from .padded_values import ZERO, Interval, Padded, PadsMatter, Tokens, padded, same, tokens_of, unknown

aten = torch.ops.aten


@dataclass(frozen=True)
class Lengths:
    """Tokens of a sample, and of one with its pads."""

    real: int
    all: int

    def first(self, size: sympy.Expr) -> int:
        """A size in the run without pads."""
        return int(size.subs(S, self.real))

    def whole(self, size: sympy.Expr) -> int:
        return int(size.subs(S, self.all))


View = Callable[[fx.Node, Sequence[Padded], Rule, Lengths], Padded]


def moved(node: fx.Node, operands: Sequence[Padded], rule: Rule, lengths: Lengths) -> Padded:
    """Transposed, expanded and the like: a dim of the result is one of the operand, or new."""
    (x,), (source,) = operands, rule.inputs
    dims, pads, alike = [], [], []
    for factor, size in zip(rule.output, info(node).shape, strict=True):
        old = source.index(factor) if factor is not None and factor in source else None
        alike.append(old is None or x.is_alike(old - len(source)))
        dims.append(tokens_of(size) if old is None else x.dims[old])
        pads.append(x.real if old is None else x.pads[old])
    return padded(dims, x.real, pads, x.whole, alike)


def reshaped(node: fx.Node, operands: Sequence[Padded], rule: Rule, lengths: Lengths) -> Padded:
    """Dims merged and split: their factors, in order, dealt out to the sizes of the result."""
    (x,) = operands
    sources = zip(info(node_inputs(node)[0]).shape, x.dims, x.pads, strict=True)
    left = [factor for source in sources for factor in _factors(*source) if factor[0] != 1]
    dims, pads = [], []
    for size in info(node).shape:
        taken = _take(left, size)
        at = [i for i, (_, tokens, _) in enumerate(taken) if tokens is not None]
        if len(at) > 1:
            raise PadsMatter("puts two sequences into one dim")
        sizes = [n for n, _, _ in taken]
        first = at[0] if at else 0
        dims.append(Tokens(sizes[first], _product(sizes[:first]), _product(sizes[first + 1 :])) if at else None)
        pads.append(taken[first][2] if at else x.real)
    return padded(dims, x.real, pads, x.whole)


_Factor = tuple[sympy.Expr, Tokens | None, Interval]


def _factors(size: sympy.Expr, tokens: Tokens | None, pads: Interval) -> list[_Factor]:
    if tokens is None:
        return [(size, None, pads)]
    return [(tokens.outer, None, pads), (tokens.size, tokens, pads), (tokens.inner, None, pads)]


def _take(left: list[_Factor], size: sympy.Expr) -> list[_Factor]:
    """Take the next factors off `left` whose product is a size; one without tokens may be split."""
    taken: list[_Factor] = []
    missing = size
    while missing != 1:
        number, tokens, pads = left.pop(0)
        rest = sympy.cancel(missing / number)
        if not _is_size(rest):
            rest = sympy.cancel(number / missing)
            if tokens is not None or not _is_size(rest):
                raise PadsMatter("deals the sequence out to dims in which no prefix is the real tokens")
            left.insert(0, (rest, None, pads))
            number, rest = missing, sympy.Integer(1)
        taken.append((number, tokens, pads))
        missing = rest
    return taken


def _is_size(number: sympy.Expr) -> bool:
    """Whether a quotient of sizes is a size."""
    return bool(sympy.denom(sympy.together(number)) == 1)


def _product(sizes: Sequence[sympy.Expr]) -> sympy.Expr:
    return sympy.Mul(*sizes)


def sliced(node: fx.Node, operands: Sequence[Padded], rule: Rule, lengths: Lengths) -> Padded:
    """A part of a dim, counted from its start; what ends before the sequence does has a real token among its pads."""
    (x,) = operands
    source, target = info(node_inputs(node)[0]).shape, info(node).shape
    dim, start = int(option(node, "dim")) % len(source), option(node, "start", 0)
    tokens, size = x.dims[dim], target[dim]
    dims, pads = list(x.dims), list(x.pads)
    if tokens is not None or S in size.free_symbols or not _is_number(start):
        _check_start(tokens, start, int(option(node, "step", 1)))
    if tokens is None and S in size.free_symbols:
        if lengths.whole(start + size) > lengths.whole(source[dim]):
            raise PadsMatter(f"reads {lengths.whole(start + size):,} rows of a table of {source[dim]}")
        dims[dim] = tokens_of(size)
    elif tokens is not None:
        cut = sympy.expand(tokens.size - start - size)
        if lengths.first(cut) < 0 or S in size.free_symbols and not cut.is_Integer:
            raise PadsMatter(f"reads {size} of a sequence of {tokens.size}, pads among them")
        dims[dim] = tokens_of(size)
        pads[dim] = x.pads[dim] if cut == 0 else x.pads[dim].hull(x.real)
    return padded(dims, x.real, pads, x.whole)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | sympy.Number)


def _number(value: Any) -> int:
    if not _is_number(value):
        raise PadsMatter("reads the length of the sequence, pads included")
    return int(value)


def _check_start(tokens: Tokens | None, start: Any, step: int) -> None:
    if tokens is not None and not tokens.alone or step != 1:
        raise PadsMatter("takes every so many tokens")
    if not _is_number(start) or start < 0:
        raise PadsMatter("reads the end of the sequence, where the pads are: count from its start")


def selected(node: fx.Node, operands: Sequence[Padded], rule: Rule, lengths: Lengths) -> Padded:
    """One token, counted from the start."""
    (x,) = operands
    dim, index = int(option(node, "dim")) % len(x.dims), option(node, "index")
    tokens = x.dims[dim]
    if tokens is not None or not _is_number(index):
        _check_start(tokens, index, 1)
    if tokens is not None and index >= lengths.first(tokens.size):
        raise PadsMatter(f"reads token {index} of {lengths.real}")
    kept = [i for i in range(len(x.dims)) if i != dim]
    return padded([x.dims[i] for i in kept], x.real, [x.pads[i] for i in kept], x.whole)


def extended(node: fx.Node, operands: Sequence[Padded], rule: Rule, lengths: Lengths) -> Padded:
    """Constants before a sequence; after it only what the pads are too, for they come to lie there."""
    (x,) = operands
    amounts, mode = [_number(a) for a in option(node, "pad")], option(node, "mode", "constant")
    fill = float(option(node, "value", 0) or 0)
    constant = Interval(fill, fill)
    dims, pads = list(x.dims), list(x.pads)
    for place in range(len(amounts) // 2):
        dim, (before, after) = len(dims) - 1 - place, amounts[2 * place : 2 * place + 2]
        if (tokens := dims[dim]) is None or not (before or after):
            continue
        if not tokens.alone or mode != "constant" or after > 0 and pads[dim] != constant:
            raise PadsMatter(f"puts {fill:g} after the last token, where the pads are")
        dims[dim] = Tokens(tokens.size + before + after)
        pads[dim] = pads[dim] if after >= 0 else pads[dim].hull(x.real)
    real = x.real.hull(constant)
    among = [p if p == constant else p.hull(constant) for p in pads]
    return padded(dims, real, among, x.whole)


def joined(node: fx.Node, operands: Sequence[Padded], rule: Rule, lengths: Lengths) -> Padded:
    """Along the sequence it is the last operand that may have tokens: pads come last."""
    dim = int(option(node, "dim", 0)) % len(info(node).shape)
    together = [x.dims[dim] for x in operands]
    if any(together[:-1]):
        raise PadsMatter("puts something after the last token, where the pads are")
    dims = [same([x.dims[i] for x in operands]) for i in range(len(info(node).shape))]
    if (last := together[-1]) is not None:
        if not last.alone:
            raise PadsMatter("puts something among the tokens")
        before = sympy.expand(info(node).shape[dim] - last.size)
        dims[dim] = Tokens(last.size + before)
    real = reduce(Interval.hull, (x.real for x in operands))
    pads = [reduce(Interval.hull, (x.at(i - len(dims)) for x in operands)) for i in range(len(dims))]
    if last is not None:
        pads[dim] = operands[-1].pads[dim]
    return padded(dims, real, pads, reduce(Interval.hull, (x.whole for x in operands)))


def triangle(node: fx.Node, operands: Sequence[Padded], rule: Rule, lengths: Lengths) -> Padded:
    """tril keeps column − row ≤ diagonal, triu ≥: at pads of the columns, and real rows, it is at least 1."""
    (x,), diagonal = operands, _number(option(node, "diagonal", 0))
    row, column = x.dims[-2:]
    if any(t is not None and not t.alone for t in (row, column)) or row and column and row.size != column.size:
        raise PadsMatter("cuts a triangle out of merged dims")
    lower = node.target is aten.tril.default
    pads = [p.hull(ZERO) for p in x.pads]
    if row and column:
        out, kept = (-1, -2) if lower else (-2, -1)
        if diagonal <= 0 if lower else diagonal >= 0:
            pads[out] = ZERO
        if diagonal >= -1 if lower else diagonal <= 1:
            pads[kept] = x.pads[kept]
    return padded(x.dims, x.real.hull(ZERO), pads, x.whole)


def constant(node: fx.Node, operands: Sequence[Padded], rule: Rule, lengths: Lengths) -> Padded:
    """The same number everywhere."""
    fill: Any = _FILLS.get(node.target, option(node, "fill_value", option(node, "s")))
    if isinstance(fill, sympy.Expr) and S in fill.free_symbols:
        raise PadsMatter(
            "reads the length of the sequence, pads included: count the targets or the ones of a mask instead"
        )
    sizes = info(node).shape
    dims = operands[0].dims if [info(n).shape for n in node_inputs(node)] == [sizes] else map(tokens_of, sizes)
    if not _is_number(fill):
        return padded(list(dims), unknown(node))
    value = float(torch.tensor(float(fill), dtype=torch.float64).to(info(node).dtype))
    return padded(list(dims), Interval(value, value))


def counted(node: fx.Node, operands: Sequence[Padded], rule: Rule, lengths: Lengths) -> Padded:
    """arange: positions, which are those of the run without pads from start on."""
    (size,) = info(node).shape
    start, step, tokens = option(node, "start", 0), option(node, "step", 1), tokens_of(size)
    numbers = _is_number(start) and _is_number(step) and step > 0
    if not numbers or tokens is not None and not tokens.alone:
        raise PadsMatter("counts from the end of the sequence, or tokens of several samples")
    if tokens is None:
        return padded([None], unknown(node))
    ends = [float(start + step * i) for i in (0, lengths.first(size) - 1, lengths.first(size), lengths.whole(size) - 1)]
    return padded([tokens], Interval(ends[0], ends[1]), [Interval(ends[2], ends[3])])


_FILLS: dict[Any, float] = {
    **dict.fromkeys((aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default), 0),
    **dict.fromkeys((aten.ones.default, aten.new_ones.default, aten.ones_like.default), 1),
}

VIEWS: Mapping[Any, View] = {
    **dict.fromkeys((aten.reshape.default, aten.squeeze.default, aten.squeeze.dims), reshaped),
    **dict.fromkeys(
        (aten.transpose.int, aten.t.default, aten.numpy_T.default, aten.mT.default, aten.permute.default,
         aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default),
        moved,
    ),
    aten.slice.Tensor: sliced,
    aten.select.int: selected,
    **dict.fromkeys((aten.pad.default, aten.constant_pad_nd.default), extended),
    aten.cat.default: joined,
    **dict.fromkeys((aten.tril.default, aten.triu.default), triangle),
    **dict.fromkeys(
        (aten.zeros.default, aten.ones.default, aten.full.default, aten.new_ones.default, aten.new_zeros.default,
         aten.new_full.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
         aten.scalar_tensor.default),
        constant,
    ),
    **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), counted),
}  # fmt: skip
