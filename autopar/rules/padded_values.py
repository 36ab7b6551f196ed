"""What a value of a padded run has: in which dims the tokens are, and between which numbers its elements lie.

A padded run and the run without pads agree on a value where all of its indices are real tokens: that is what every
rule of padded_ops.py keeps. Of the elements at pads it is known in which interval they lie, for what masks and sums
make of pads depends on that alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf, isinf

import sympy
import torch
from torch import fx

from ..ir.graph import S, info


class PadsMatter(Exception):  # noqa: N818 - said of a model, not of a program that went wrong
    """Pads would change what an op computes of real tokens, or might; the message says why and what to do."""


@dataclass(frozen=True)
class Interval:
    """The numbers from low to high; truth values are 0 and 1. finite: none of them is −inf, which hides a score.

    +inf has no use, and makes nan of −inf or 0: PadsMatter where it is written down.
    """

    low: float
    high: float
    finite: bool = True

    def __post_init__(self) -> None:
        if self.low == inf:
            raise PadsMatter("makes +inf, of which 0 or −inf at pads make nan: use a finite number")
        if self.low == self.high and isinf(self.low):
            object.__setattr__(self, "finite", False)

    @property
    def constant(self) -> float | None:
        return self.low if self.low == self.high else None

    def hull(self, other: Interval) -> Interval:
        return Interval(min(self.low, other.low), max(self.high, other.high), self.finite and other.finite)


ANY, TRUTH, ZERO = Interval(-inf, inf), Interval(0, 1), Interval(0, 0)
POSITIVE = Interval(0, inf)  # or 0


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
    this dim is a pad and in every other a real token; of a dim without tokens, `real`. whole: all elements, also those
    at pads of several dims. alike: by dim, whether pads there have what real tokens have, all else the same."""

    dims: tuple[Tokens | None, ...]
    real: Interval
    pads: tuple[Interval, ...]
    whole: Interval
    alike: tuple[bool, ...] = ()

    def is_alike(self, dim: int) -> bool:
        """Whether pads of a dim counted from the last, −1, are as its tokens, also of one that it lacks."""
        if -dim > len(self.dims) or self.dims[dim] is None or self.alike and self.alike[dim]:
            return True
        return self.real.constant is not None and self.pads[dim] == self.real

    def at(self, dim: int) -> Interval:
        """Its elements at the pads of a dim counted from the last, −1, also of one that it lacks."""
        return self.pads[dim] if -dim <= len(self.dims) and self.dims[dim] is not None else self.real


def padded(
    dims: Sequence[Tokens | None],
    real: Interval,
    pads: Sequence[Interval] | None = None,
    whole: Interval | None = None,
    alike: Sequence[bool] = (),
) -> Padded:
    """A value; the elements at pads lie where the real ones do, unless they are given, and all of them in the hull."""
    pads = [real] * len(dims) if pads is None else pads
    pads = [p if t else real for t, p in zip(dims, pads, strict=True)]
    return Padded(
        tuple(dims), real, tuple(pads), reduce(Interval.hull, pads, real if whole is None else whole), tuple(alike)
    )


def same(found: Sequence[Tokens | None]) -> Tokens | None:
    """The tokens of a dim that several operands share: PadsMatter where their pads are at different places."""
    different = list(dict.fromkeys(t for t in found if t is not None))
    if len(different) > 1:
        raise PadsMatter("pairs tokens that lie differently, so that real ones would meet pads")
    return different[0] if different else None
