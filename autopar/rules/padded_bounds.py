"""Between which numbers the result of an elementwise op lies, by those between which its operands lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from math import exp, inf, isinf, isnan, sqrt
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_arg

from ..ir.graph import info, node_inputs, op_name
from .arguments import option
from .padded_values import ANY, POSITIVE, TRUTH, ZERO, Interval, PadsMatter, unknown

_Arguments = list[Interval]


def apply(node: fx.Node, operands: Sequence[Interval]) -> Interval:
    """Where the result of an elementwise op lies. Products with 0 are 0: padded_finite.py has refused infinite ones."""
    if all(o.constant is not None for o in operands) and (value := _computed(node, operands)) is not None:
        return Interval(value, value)
    name = op_name(node)
    if name not in _RULES:
        return unknown(node)
    found, dtype = _RULES[name](node, arguments_of(node, operands)), info(node).dtype
    if not dtype.is_floating_point:
        return found if _holds(dtype, found) else unknown(node)
    return Interval(_rounded(found.low, dtype), _rounded(found.high, dtype), found.finite)


def _rounded(value: float, dtype: torch.dtype) -> float:
    """Rounding keeps order, so bounds are rounded as what lies between them is. PadsMatter where a dtype has no such
    number."""
    rounded = float(torch.tensor(value, dtype=torch.float64).to(dtype))
    if isinf(rounded) and not isinf(value):
        raise PadsMatter(f"may be {value:.3g} at pads, which {str(dtype).removeprefix('torch.')} cannot hold")
    return rounded


def _holds(dtype: torch.dtype, found: Interval) -> bool:
    """Whether integers between these bounds do not wrap around; int64 is taken to be wide enough."""
    least, most = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return dtype == torch.int64 or least <= found.low and found.high <= most


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
    """The op's arguments in order, tensors and numbers alike. Numbers are rounded where an op computes in its
    operands' dtype, and are not where it computes in a wider one: they lie between."""
    of = dict(zip(node_inputs(node), operands, strict=True))
    floats = {n.dtype for n in map(info, (node, *node_inputs(node))) if n.dtype.is_floating_point} or {torch.float32}

    def interval(argument: Any) -> Interval:
        if isinstance(argument, fx.Node):
            return of[argument]
        if not isinstance(argument, int | float | sympy.Number):
            return ANY
        numbers = [float(argument), *(_rounded(float(argument), dtype) for dtype in floats)]
        return Interval(min(numbers), max(numbers))

    return [interval(a) for a in node.args]


def _less(a: Interval, b: Interval) -> Interval:
    """a < b."""
    return Interval(float(a.high < b.low), float(a.low < b.high))


def _not(a: Interval) -> Interval:
    return Interval(1 - a.high, 1 - a.low)


def _differs(a: Interval, b: Interval) -> Interval:
    """a ≠ b."""
    return Interval(float(a.high < b.low or b.high < a.low), float(a.constant is None or a.constant != b.constant))


def _sum(a: Interval, b: Interval) -> Interval:
    if -inf in (a.constant, b.constant):  # a score that is masked out stays so
        return Interval(-inf, -inf)
    low, high = a.low + b.low, a.high + b.high
    return replace(ANY if isnan(low) or isnan(high) else Interval(low, high), finite=a.finite and b.finite)


def _negative(a: Interval) -> Interval:
    return Interval(-a.high, -a.low)


def _product(node: fx.Node, arguments: _Arguments) -> Interval:
    a, b = arguments
    ends = [0.0 if 0 in (x, y) else x * y for x, y in product((a.low, a.high), (b.low, b.high))]
    same = node.args[0] is node.args[1]
    return Interval(max(min(ends), 0) if same else min(ends), max(ends))


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


def _dropped(node: fx.Node, arguments: _Arguments) -> Interval:
    return ZERO if arguments[0] == ZERO else ANY


def _clamped(node: fx.Node, arguments: _Arguments) -> Interval:
    least, most = option(node, "min", -inf), option(node, "max", inf)
    if isinstance(least, fx.Node) or isinstance(most, fx.Node):
        return ANY
    return _monotone(lambda x: min(max(x, float(least)), float(most)), arguments[0])


def _monotone(function: Callable[[float], float], x: Interval) -> Interval:
    return Interval(function(x.low), function(x.high))


def _exp(x: float) -> float:
    return exp(x) if x < 700 else inf


_RULES: dict[str, Callable[[fx.Node, _Arguments], Interval]] = {
    "lt": lambda node, a: _less(a[0], a[1]),
    "gt": lambda node, a: _less(a[1], a[0]),
    "ge": lambda node, a: _not(_less(a[0], a[1])),
    "le": lambda node, a: _not(_less(a[1], a[0])),
    "ne": lambda node, a: _differs(a[0], a[1]),
    "eq": lambda node, a: _not(_differs(a[0], a[1])),
    "add": lambda node, a: _plain(node, _sum, a),
    "sub": lambda node, a: _plain(node, lambda x, y: _sum(x, _negative(y)), a),
    "rsub": lambda node, a: _plain(node, lambda x, y: _sum(y, _negative(x)), a),
    "neg": lambda node, a: _negative(a[0]),
    "mul": _product,
    "pow": lambda node, a: POSITIVE if len(a) == 2 and a[1].constant in (2, 4) else ANY,
    **dict.fromkeys(("abs", "square", "rsqrt"), lambda node, a: POSITIVE),
    "exp": lambda node, a: _monotone(_exp, a[0]),
    "relu": lambda node, a: _monotone(lambda x: max(x, 0.0), a[0]),
    "sigmoid": lambda node, a: Interval(0, 1),
    **dict.fromkeys(("tanh", "sin", "cos", "sign"), lambda node, a: Interval(-1, 1)),
    "sqrt": lambda node, a: _monotone(lambda x: sqrt(max(x, 0)), a[0]),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _clamped),
    "maximum": lambda node, a: Interval(max(a[0].low, a[1].low), max(a[0].high, a[1].high)),
    "minimum": lambda node, a: Interval(min(a[0].low, a[1].low), min(a[0].high, a[1].high)),
    **dict.fromkeys(("__and__", "bitwise_and", "logical_and"), _both),
    **dict.fromkeys(("__or__", "bitwise_or", "logical_or"), _either),
    **dict.fromkeys(("logical_not", "bitwise_not"), lambda node, a: _not(a[0]) if _truths(node) else unknown(node)),
    "where": _where,
    "masked_fill": _filled,
    "to": _cast,
    **dict.fromkeys(("alias", "clone", "detach"), lambda node, a: a[0]),
    "dropout": _dropped,
}
