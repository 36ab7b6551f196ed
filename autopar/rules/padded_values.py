"""What a value of a padded run has: in which dims the tokens are, and between which numbers its elements lie.

A padded run and the run without pads agree on a value where all of its indices are real tokens: that is what every
rule of padded_ops.py keeps. Of the elements at pads it is known in which interval they lie, for what masks and sums
make of pads depends on that alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isinf, isnan, sqrt
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_arg

from ..ir.graph import S, info, node_inputs

aten = torch.ops.aten


class PadsMatter(Exception):  # noqa: N818 - said of a model, not of a program that went wrong
    """Pads would change what an op computes of real tokens, or might; the message says why and what to do."""


@dataclass(frozen=True)
class Interval:
    """The numbers from low to high; truth values are 0 and 1. finite: none of them is ±inf."""

    low: float
    high: float
    finite: bool = True

    def __post_init__(self) -> None:
        if self.low == self.high and isinf(self.low):
            object.__setattr__(self, "finite", False)

    @property
    def constant(self) -> float | None:
        return self.low if self.low == self.high else None

    def hull(self, other: Interval) -> Interval:
        return Interval(min(self.low, other.low), max(self.high, other.high), self.finite and other.finite)


ANY, TRUTH, ZERO = Interval(-inf, inf), Interval(0, 1), Interval(0, 0)
_POSITIVE = Interval(0, inf)  # or 0


def unknown(node: fx.Node) -> Interval:
    """What is known of an op's result without looking at it."""
    return TRUTH if info(node).dtype == torch.bool else ANY


@dataclass(frozen=True)
class Tokens:
    """A dim with the tokens of the sequence: an index is one of `outer`, then a token, then one of `inner`.

    size: s, or s and a constant; in a run of n tokens the first size(n) are real.
    """

    size: sympy.Expr
    outer: sympy.Expr = sympy.Integer(1)
    inner: sympy.Expr = sympy.Integer(1)

    @property
    def alone(self) -> bool:
        return bool(self.outer == 1 and self.inner == 1)


def tokens_of(size: sympy.Expr) -> Tokens | None:
    """The tokens of a dim that is made in its size; none where the size has no sequence."""
    if S not in size.free_symbols:
        return None
    if sympy.expand(size - S).is_Integer:
        return Tokens(size)
    outer = sympy.cancel(size / S)
    if S in outer.free_symbols:
        raise PadsMatter(f"has a dim of {size} elements, of which no prefix belongs to the real tokens")
    return Tokens(S, outer)


@dataclass(frozen=True)
class Padded:
    """A value. dims: where its tokens are. real: its elements at real tokens. pads: by dim, those whose index in
    this dim is a pad and in every other a real token; of a dim without tokens, `real`."""

    dims: tuple[Tokens | None, ...]
    real: Interval
    pads: tuple[Interval, ...]

    def at(self, dim: int) -> Interval:
        """Its elements at the pads of a dim counted from the last, −1, also of one that it lacks."""
        return self.pads[dim] if -dim <= len(self.dims) and self.dims[dim] is not None else self.real


def padded(dims: Sequence[Tokens | None], real: Interval, pads: Sequence[Interval] | None = None) -> Padded:
    """A value; the elements at pads lie where the real ones do, unless they are given."""
    pads = [real] * len(dims) if pads is None else pads
    return Padded(tuple(dims), real, tuple(p if t else real for t, p in zip(dims, pads, strict=True)))


def same(found: Sequence[Tokens | None]) -> Tokens | None:
    """The tokens of a dim that several operands share: PadsMatter where their pads are at different places."""
    different = list(dict.fromkeys(t for t in found if t is not None))
    if len(different) > 1:
        raise PadsMatter("pairs tokens that lie differently, so that real ones would meet pads")
    return different[0] if different else None


# --------------------------------------------------------------------------------
# Elementwise ops on intervals


def apply(node: fx.Node, operands: Sequence[Interval]) -> Interval:
    """Where the result of an elementwise op lies. Products with 0 are 0: padded_finite.py has refused infinite ones."""
    if all(o.constant is not None for o in operands) and (value := _computed(node, operands)) is not None:
        return Interval(value, value)
    name = str(node.target).split(".")[1]
    if name not in _RULES:
        return unknown(node)
    found, dtype = _RULES[name](node, arguments_of(node, operands)), info(node).dtype
    if not dtype.is_floating_point:
        return found
    return Interval(_rounded(found.low, dtype), _rounded(found.high, dtype), found.finite)


def _rounded(value: float, dtype: torch.dtype) -> float:
    """Rounding keeps order, so bounds are rounded as what lies between them is."""
    return float(torch.tensor(value, dtype=torch.float64).to(dtype))


def _computed(node: fx.Node, operands: Sequence[Interval]) -> float | None:
    """The op's result for one number a tensor; None of a random one, or where it is no number."""
    target: Any = node.target
    given = zip(node_inputs(node), operands, strict=True)
    values = {n: torch.tensor(o.low, dtype=torch.float64).to(info(n).dtype) for n, o in given}
    if torch.Tag.nondeterministic_seeded in target.tags:
        return None
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])
    try:
        value = float(target(*args, **kwargs))
    except (RuntimeError, TypeError, ValueError):
        return None
    return None if isnan(value) else value


def arguments_of(node: fx.Node, operands: Sequence[Interval]) -> list[Interval]:
    """The op's arguments in order, tensors and numbers alike."""
    of = dict(zip(node_inputs(node), operands, strict=True))

    def interval(argument: Any) -> Interval:
        if isinstance(argument, fx.Node):
            return of[argument]
        known = isinstance(argument, int | float | sympy.Number)
        return Interval(float(argument), float(argument)) if known else ANY

    return [interval(a) for a in node.args]


_Arguments = list[Interval]


def _less(a: Interval, b: Interval) -> Interval:
    """a < b."""
    return Interval(float(a.high < b.low), float(a.low < b.high))


def _not(a: Interval) -> Interval:
    return Interval(1 - a.high, 1 - a.low)


def _sum(a: Interval, b: Interval) -> Interval:
    if -inf in (a.constant, b.constant):  # a score that is masked out stays so
        return Interval(-inf, -inf)
    low, high = a.low + b.low, a.high + b.high
    return replace(ANY if isnan(low) or isnan(high) else Interval(low, high), finite=a.finite and b.finite)


def _negative(a: Interval) -> Interval:
    return Interval(-a.high, -a.low)


def _plain(node: fx.Node, rule: Callable[[Interval, Interval], Interval], arguments: _Arguments) -> Interval:
    """Of add and sub without a third argument, which multiplies the second."""
    return unknown(node) if node.kwargs or len(arguments) != 2 else rule(*arguments)


def _both(node: fx.Node, arguments: _Arguments) -> Interval:
    if not _truths(node):
        return ZERO if ZERO in arguments else unknown(node)
    return Interval(min(a.low for a in arguments), min(a.high for a in arguments))


def _either(node: fx.Node, arguments: _Arguments) -> Interval:
    if not _truths(node):
        return unknown(node)
    return Interval(max(a.low for a in arguments), max(a.high for a in arguments))


def _truths(node: fx.Node) -> bool:
    return all(n.dtype == torch.bool for n in (info(node), *map(info, node_inputs(node))))


def _chosen(condition: Interval, yes: Interval, no: Interval) -> Interval:
    return {1: yes, 0: no}.get(int(condition.low) if condition.constant is not None else 2, yes.hull(no))


def _cast(node: fx.Node, arguments: _Arguments) -> Interval:
    (given,) = arguments[:1]
    if info(node).dtype == torch.bool:
        return TRUTH if given.low <= 0 <= given.high else Interval(1, 1)
    return (
        given if info(node).dtype.is_floating_point or not info(node_inputs(node)[0]).dtype.is_floating_point else ANY
    )


def _where(node: fx.Node, arguments: _Arguments) -> Interval:
    return _chosen(*arguments) if len(arguments) == 3 else unknown(node)


def _filled(node: fx.Node, arguments: _Arguments) -> Interval:
    x, mask, value = arguments
    return _chosen(mask, value, x)


def _kept(node: fx.Node, arguments: _Arguments) -> Interval:
    return arguments[0]


def _dropped(node: fx.Node, arguments: _Arguments) -> Interval:
    return ZERO if arguments[0] == ZERO else ANY


_RULES: dict[str, Callable[[fx.Node, _Arguments], Interval]] = {
    "lt": lambda node, a: _less(a[0], a[1]),
    "gt": lambda node, a: _less(a[1], a[0]),
    "ge": lambda node, a: _not(_less(a[0], a[1])),
    "le": lambda node, a: _not(_less(a[1], a[0])),
    "add": lambda node, a: _plain(node, _sum, a),
    "sub": lambda node, a: _plain(node, lambda x, y: _sum(x, _negative(y)), a),
    "rsub": lambda node, a: _plain(node, lambda x, y: _sum(y, _negative(x)), a),
    "neg": lambda node, a: _negative(a[0]),
    "mul": lambda node, a: ZERO if ZERO in a else _POSITIVE if node.args[0] is node.args[1] else ANY,
    "pow": lambda node, a: _POSITIVE if len(a) == 2 and a[1].constant in (2, 4) else ANY,
    **dict.fromkeys(("abs", "exp", "relu", "square", "sigmoid"), lambda node, a: _POSITIVE),
    "sqrt": lambda node, a: Interval(sqrt(max(a[0].low, 0)), inf),
    "rsqrt": lambda node, a: _POSITIVE,
    "clamp_min": lambda node, a: Interval(max(a[0].low, a[1].low), inf),
    **dict.fromkeys(("__and__", "bitwise_and", "logical_and"), _both),
    **dict.fromkeys(("__or__", "bitwise_or", "logical_or"), _either),
    **dict.fromkeys(("logical_not", "bitwise_not"), lambda node, a: _not(a[0]) if _truths(node) else unknown(node)),
    "where": _where,
    "masked_fill": _filled,
    "to": _cast,
    **dict.fromkeys(("alias", "clone", "detach"), _kept),
    "dropout": _dropped,
}
