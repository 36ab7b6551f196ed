"""Mesh axes: what each offers to shard, and how parameters, inputs and the loss lie on it.

An axis is a value. A further one (experts, over a part of the data ranks) is one more class here, with its
strategies in the rules under its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import sympy
from torch import fx

from ..ir.graph import B, NodeInfo, S
from ..placement import GRAD_PARTIAL, PARTIAL, REPLICATE, Placement, Shard, Strategy


@dataclass(frozen=True)
class Axis:
    """A mesh axis of `size` ranks. values: the numbers of `b` and `s`, by which it is known what divides evenly."""

    size: int
    values: Mapping[sympy.Symbol, int] = field(default_factory=dict)
    name: ClassVar[str]
    loss: ClassVar[Placement] = PARTIAL  # how the loss leaves the program
    cuts_parameters: ClassVar[bool] = False
    cuts_integers: ClassVar[bool] = True  # values between blocks that have no gradient

    def offers(self, sizes: Iterable[sympy.Expr], uneven: bool = True) -> bool:
        """Whether a factor with dims of these sizes may be sharded here, evenly or (`uneven`) by the chunk rule."""
        raise NotImplementedError

    def even(self, size: sympy.Expr) -> bool:
        """Whether shards of a dim of this size are equal, so that collectives may run along it."""
        raise NotImplementedError

    def shards(self, facts: NodeInfo) -> list[Placement]:
        """The shards that a value may be of which no op says more."""
        return [Shard(d) for d, n in enumerate(facts.shape) if n != 1 and self.offers([n])]

    def stored(self, facts: NodeInfo) -> list[Placement]:
        """The placements that a parameter may be stored in; one that is not cut is read for different work."""
        if not self.cuts_parameters:
            return [GRAD_PARTIAL if facts.requires_grad else REPLICATE]
        return [REPLICATE, *([GRAD_PARTIAL] if facts.requires_grad else []), *self.shards(facts)]

    def given(self, facts: NodeInfo) -> Placement:
        """How an input of the model or a buffer lies."""
        return REPLICATE

    def adapted(self, node: fx.Node, options: list[Strategy], reading: tuple[Placement, ...]) -> list[Strategy]:
        """The strategies of a node that reads these placements, of those that its rule gives."""
        return options

    def number(self, size: sympy.Expr) -> int:
        """A size at the values of `b` and `s`."""
        return int(size if size.is_Integer else size.subs(dict(self.values)))


@dataclass(frozen=True)
class TensorAxis(Axis):
    """tp. sequence: whether the sequence may be sharded (sequence parallelism); the batch never is."""

    sequence: bool = False
    name: ClassVar[str] = "tp"
    loss: ClassVar[Placement] = REPLICATE
    cuts_parameters: ClassVar[bool] = True
    cuts_integers: ClassVar[bool] = False

    def offers(self, sizes: Iterable[sympy.Expr], uneven: bool = True) -> bool:
        sizes = list(sizes)
        symbols = symbols_of(sizes)
        if B in symbols or S in symbols and not self.sequence:
            return False
        numbers = {self.number(size) for size in sizes}
        if all(n % self.size == 0 for n in numbers):
            return True
        return uneven and len(numbers) == 1 and S not in symbols and self._none_empty(min(numbers))

    def _none_empty(self, number: int) -> bool:
        """Whether the chunk rule leaves something to every rank: 4 in chunks of ceil(4/3) are 2, 2 and 0."""
        return -(-number // self.size) * (self.size - 1) < number

    def even(self, size: sympy.Expr) -> bool:
        return B in size.free_symbols or self.number(size) % self.size == 0


@dataclass(frozen=True)
class ContextAxis(Axis):
    """cp: it shards the sequence, also of merged rows b·s, along which no collective runs.

    heads: whether dims other than the sequence may be sharded (Ulysses). inner: the ranks of tp, over which a shard of
    heads is dealt out again. parts: into how many a sequence is cut, if not one a rank (zigzag: two).
    """

    parts: int = 0
    heads: bool = False
    inner: int = 1
    name: ClassVar[str] = "cp"

    def offers(self, sizes: Iterable[sympy.Expr], uneven: bool = True) -> bool:
        sizes = list(sizes)
        symbols = symbols_of(sizes)
        if B in symbols or S in symbols:
            merged = B in symbols  # rows b·s: each sample is cut, whatever their number
            return all(S in size.free_symbols and (merged or self.even(size)) for size in sizes)
        return self.heads and all(self.number(size) % (self.size * self.inner) == 0 for size in sizes)

    def even(self, size: sympy.Expr) -> bool:
        if B in size.free_symbols:
            return False
        return self.number(size) % (self.parts or self.size if S in size.free_symbols else self.size) == 0


def symbols_of(sizes: Iterable[sympy.Expr]) -> set[sympy.Basic]:
    return set().union(*(size.free_symbols for size in sizes))
