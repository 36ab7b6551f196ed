"""Proofs about attention masks: which pairs of positions a tensor of bools lets see each other, at every length.

An op is read as what it gives at one index: an integer, linear in the index of each dim, or a condition, integers that
must all be ≥ 0. What is not understood is neither, nor is what is made of it: data, parameters, floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from .graph import Shape, info

aten = torch.ops.aten

Condition = frozenset[sympy.Expr]
Value: TypeAlias = "sympy.Expr | Condition"

_NEVER: Condition = frozenset({sympy.Integer(-1)})


@dataclass(frozen=True)
class CausalMask:
    """Row i sees the keys j ≤ i; with a window w, of these the last: i − w < j ≤ i."""

    window: int | None = None


def causal_mask(mask: fx.Node, rows: sympy.Expr, keys: sympy.Expr) -> CausalMask | None:
    """What a mask [.., rows, keys] is for every length, if that is causal; None where it is not, or not understood."""
    condition = _Reading().value(mask)
    if not isinstance(condition, frozenset) or info(mask).shape[-2:] != (rows, keys) or rows != keys:
        return None
    distances = _distances(wanted for wanted in condition if not _holds(wanted, rows, keys))
    if distances is None:
        return None
    ahead, behind = distances
    if ahead != 0 or (behind is not None and behind < 0):
        return None
    return CausalMask(None if behind is None else behind + 1)


def _distances(conditions: Iterable[sympy.Expr]) -> tuple[int | None, int | None] | None:
    """How far a key j may be ahead of its row i, and how far behind, by conditions c·i − c·j + d ≥ 0.

    None on a side without a limit; None for both where a condition has another form.
    """
    ahead, behind = list[int](), list[int]()
    for wanted in conditions:
        at_row, at_key, rest = _by_index(wanted)
        if at_row != -at_key or at_row == 0 or not (at_row.is_Integer and rest.is_Integer):
            return None
        (ahead if at_row > 0 else behind).append(int(rest) // abs(int(at_row)))
    return min(ahead, default=None), min(behind, default=None)


def hides_nothing(mask: fx.Node, rows: sympy.Expr, keys: sympy.Expr) -> bool:
    """Whether a mask that is broadcast to [.., rows, keys] is true everywhere, for every length."""
    condition = _Reading().value(mask)
    return isinstance(condition, frozenset) and all(_holds(wanted, rows, keys) for wanted in condition)


def _by_index(wanted: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr]:
    """What an integer has of the index of a row, of that of a key, and the rest."""
    at_row, at_key = (wanted.coeff(_index(place)) for place in (2, 1))
    return at_row, at_key, sympy.expand(wanted - at_row * _index(2) - at_key * _index(1))


def _holds(wanted: sympy.Expr, rows: sympy.Expr, keys: sympy.Expr) -> bool:
    """Whether an integer is ≥ 0 wherever the pair of row and key is."""
    at_row, at_key, rest = _by_index(wanted)
    if not (at_row.is_Integer and at_key.is_Integer) or rest.has(_Index):
        return False
    least = rest + sum(n * (size - 1) for n, size in ((at_row, rows), (at_key, keys)) if n < 0)
    return bool(least.is_nonnegative)


class _Index(sympy.Symbol):  # type: ignore[misc]
    """The index of a dim."""


def _index(place: int) -> sympy.Symbol:
    """That of a dim counted from the last as 1: broadcasting changes none."""
    return _Index(f"i{place}", integer=True, nonnegative=True)


@dataclass(frozen=True)
class _Reading:
    """What each node gives at an index, once for all its readers."""

    known: dict[fx.Node, Value | None] = field(default_factory=dict)

    def value(self, node: fx.Node) -> Value | None:
        if node not in self.known:
            self.known[node] = self._read(node)
        return self.known[node]

    def _read(self, node: fx.Node) -> Value | None:
        reader = _READERS.get(node.target) if node.op == "call_function" else None
        if reader is None or info(node).dtype not in _KINDS or not set(node.kwargs) <= _OPTIONS:
            return None
        given = [self.value(a) if isinstance(a, fx.Node) else a for a in node.args]
        if any(value is None for value, a in zip(given, node.args, strict=True) if isinstance(a, fx.Node)):
            return None
        found = reader(node, *given)
        if found is None or isinstance(found, frozenset) != (info(node).dtype is torch.bool):
            return None
        # A dim of size 1 is at 0, to whatever it is broadcast.
        single = [place for place, n in enumerate(reversed(info(node).shape), 1) if n == 1]
        return _at(found, {_index(place): sympy.Integer(0) for place in single})


_KINDS = (torch.bool, torch.int64, torch.int32)
_OPTIONS = {"dtype", "layout", "device", "pin_memory", "memory_format", "alpha"}  # others are read by position


def _at(value: Value, indices: Mapping[sympy.Symbol, sympy.Expr]) -> Value:
    """The same with other indices, all of them exchanged at once."""
    if isinstance(value, frozenset):
        return frozenset(sympy.expand(wanted.subs(indices, simultaneous=True)) for wanted in value)
    return sympy.expand(value.subs(indices, simultaneous=True))


# --------------------------------------------------------------------------------
# Integers


def _number(value: Any) -> sympy.Expr | None:
    """An integer operand: of a tensor, or of Python."""
    if isinstance(value, sympy.Expr) and value.is_integer:
        return value
    return sympy.Integer(value) if type(value) is int else None


def _count(node: fx.Node, *bounds: Any) -> Value | None:
    """arange(stop), arange(start, stop) and arange(start, stop, step)."""
    start, step = _number(bounds[0] if len(bounds) > 1 else 0), _number(bounds[2] if len(bounds) > 2 else 1)
    return None if start is None or step is None else start + step * _index(1)


def _constant(fill: Any) -> Callable[..., Value | None]:
    def read(node: fx.Node, shape: Any, filled: Any = fill) -> Value | None:
        if info(node).dtype is torch.bool:
            return (frozenset() if filled else _NEVER) if isinstance(filled, int) else None
        return _number(filled)

    return read


def _sum(sign: int) -> Callable[..., Value | None]:
    def read(node: fx.Node, left: Any, right: Any) -> Value | None:
        a, b, scale = _number(left), _number(right), _number(node.kwargs.get("alpha", 1))
        return None if a is None or b is None or scale is None else a + sign * scale * b

    return read


def _product(node: fx.Node, left: Any, right: Any) -> Value | None:
    if isinstance(left, frozenset):
        return _both(node, left, right)
    a, b = _number(left), _number(right)
    return None if a is None or b is None or not (a.is_Integer or b.is_Integer) else a * b


def _negative(node: fx.Node, value: Any) -> Value | None:
    return None if (number := _number(value)) is None else -number


# --------------------------------------------------------------------------------
# Conditions


def _order(least: Callable[[sympy.Expr, sympy.Expr], list[sympy.Expr]]) -> Callable[..., Value | None]:
    """A comparison of integers, as what must be ≥ 0."""

    def read(node: fx.Node, left: Any, right: Any) -> Value | None:
        a, b = _number(left), _number(right)
        return None if a is None or b is None else frozenset(map(sympy.expand, least(a, b)))

    return read


def _both(node: fx.Node, left: Any, right: Any) -> Value | None:
    return left | right if isinstance(left, frozenset) and isinstance(right, frozenset) else None


def _either(node: fx.Node, left: Any, right: Any) -> Value | None:
    """Only with a side that always, or never, holds."""
    for one, other in ((left, right), (right, left)):
        if one == frozenset() and isinstance(other, frozenset):
            return one
        if one == _NEVER and isinstance(other, frozenset):
            return other
    return None


def _negation(node: fx.Node, value: Any) -> Value | None:
    """Of a single comparison: of several it would be an alternative."""
    if not isinstance(value, frozenset) or len(value) > 1:
        return None
    return frozenset(sympy.expand(-wanted - 1) for wanted in value) if value else _NEVER


def _triangle(sign: int) -> Callable[..., Value | None]:
    """tril (1): what is true, and at key ≤ row + diagonal; triu (−1): at key ≥ row + diagonal."""

    def read(node: fx.Node, value: Any, diagonal: Any = 0) -> Value | None:
        offset = _number(diagonal)
        if not isinstance(value, frozenset) or offset is None:
            return None
        return value | {sympy.expand(sign * (_index(2) - _index(1) + offset))}

    return read


# --------------------------------------------------------------------------------
# Views


def _moved(source: Sequence[int], target: Sequence[int], value: Value) -> Value:
    """The dims `source` of the operand, counted from the last, are the dims `target` of the result."""
    return _at(value, {_index(old): _index(new) for old, new in zip(source, target, strict=True)})


def _long(shape: Shape) -> list[int]:
    return [place for place, n in enumerate(reversed(shape), 1) if n != 1]


def _view(node: fx.Node, value: Any, *shape: Any) -> Value | None:
    """A view that only adds or takes away dims of size 1."""
    source, target = info(_operand(node)).shape, info(node).shape
    if [n for n in source if n != 1] != [n for n in target if n != 1]:
        return None
    return _moved(_long(source), _long(target), value)


def _same(node: fx.Node, value: Any, *rest: Any) -> Value | None:
    """Expansions, for what is of size 1 is at 0; casts between integers, copies."""
    result: Value = value
    return result


def _exchange(node: fx.Node, value: Any, first: int, second: int) -> Value | None:
    rank = len(info(node).shape)
    a, b = (rank - dim % rank for dim in (first, second))
    return _moved((a, b), (b, a), value)


def _permutation(node: fx.Node, value: Any, dims: Sequence[int]) -> Value | None:
    rank = len(dims)
    return _moved([rank - dim % rank for dim in dims], range(rank, 0, -1), value)


def _part(node: fx.Node, value: Any, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> Value | None:
    """A slice that starts at a position counted from the first."""
    first = _number(0 if start is None else start)
    if first is None or not first.is_nonnegative:
        return None
    place = len(info(node).shape) - dim % len(info(node).shape)
    return _at(value, {_index(place): first + step * _index(place)})


def _operand(node: fx.Node) -> fx.Node:
    first = node.args[0]
    assert isinstance(first, fx.Node)
    return first


_READERS: dict[Any, Callable[..., Value | None]] = {
    **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), _count),
    aten.ones.default: _constant(1),
    aten.zeros.default: _constant(0),
    aten.full.default: _constant(None),
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _sum(1)),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _sum(-1)),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _product),
    aten.neg.default: _negative,
    **dict.fromkeys((aten.le.Tensor, aten.le.Scalar), _order(lambda a, b: [b - a])),
    **dict.fromkeys((aten.lt.Tensor, aten.lt.Scalar), _order(lambda a, b: [b - a - 1])),
    **dict.fromkeys((aten.ge.Tensor, aten.ge.Scalar), _order(lambda a, b: [a - b])),
    **dict.fromkeys((aten.gt.Tensor, aten.gt.Scalar), _order(lambda a, b: [a - b - 1])),
    **dict.fromkeys((aten.eq.Tensor, aten.eq.Scalar), _order(lambda a, b: [a - b, b - a])),
    **dict.fromkeys((aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default), _both),
    **dict.fromkeys((aten.__or__.Tensor, aten.bitwise_or.Tensor, aten.logical_or.default), _either),
    **dict.fromkeys((aten.bitwise_not.default, aten.logical_not.default), _negation),
    aten.tril.default: _triangle(1),
    aten.triu.default: _triangle(-1),
    **dict.fromkeys((aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim), _view),
    **dict.fromkeys((aten.expand.default, aten.clone.default, aten.alias.default, aten.detach.default), _same),
    aten.to.dtype: _same,
    aten.transpose.int: _exchange,
    aten.permute.default: _permutation,
    aten.slice.Tensor: _part,
}
"""What an op gives at an index, by the node and its operands; bools in, bools out, else `_read` drops it."""
