"""Pieces of Python source: expressions with their precedence, sizes, literals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from ..errors import PlanError

COMPARISON, SUM, PRODUCT, UNARY, ATOM = 0, 1, 2, 3, 4


@dataclass(frozen=True)
class Text:
    """Source of an expression, the precedence of its outermost operator, and the names it imports."""

    source: str
    precedence: int = ATOM
    imports: frozenset[str] = frozenset()

    def at(self, precedence: int) -> str:
        return self.source if self.precedence >= precedence else f"({self.source})"


Render = Callable[[Any], Text]


# --------------------------------------------------------------------------------
# Sizes


def size_text(value: Any) -> str:
    """A local size: `s // 2`, `b * s`, 64."""
    return size(value).source


def size(value: Any) -> Text:
    """A size with its precedence. Fractions are exact divisions: a shard's share of a dim that tp divides."""
    expr: Any = sympy.sympify(value)
    if expr.is_Symbol or expr.is_number:
        return Text(str(expr), UNARY if expr.is_negative else ATOM)
    numerator, denominator = expr.as_numer_denom()
    if denominator != 1:
        return _divided(numerator, denominator)
    if expr.is_Add:
        return _sum(expr.as_ordered_terms())
    if expr.is_Mul:
        return _product(expr.as_ordered_factors())
    if expr.is_Pow:
        return Text(f"{size(expr.base).at(ATOM)}**{size(expr.exp).at(ATOM)}", UNARY)
    return _function(expr)


def _divided(numerator: Any, denominator: Any) -> Text:
    return Text(f"{size(numerator).at(PRODUCT)} // {size(denominator).at(UNARY)}", PRODUCT)


def _sum(terms: Sequence[Any]) -> Text:
    source = size(terms[0]).at(PRODUCT)
    for term in terms[1:]:
        minus = term.could_extract_minus_sign()
        source += f" - {size(-term).at(PRODUCT)}" if minus else f" + {size(term).at(PRODUCT)}"
    return Text(source, SUM)


def _product(factors: Sequence[Any]) -> Text:
    if factors[0] == -1:
        return Text("-" + " * ".join(size(f).at(UNARY) for f in factors[1:]), PRODUCT)
    return Text(" * ".join([size(factors[0]).at(PRODUCT), *(size(f).at(UNARY) for f in factors[1:])]), PRODUCT)


def _function(expr: Any) -> Text:
    """torch's FloorDiv, Mod and the like, which are sympy functions of their own."""
    name = expr.func.__name__
    if name in ("FloorDiv", "CleanDiv"):
        return _divided(*expr.args)
    if name in ("Mod", "PythonMod"):
        left, right = expr.args
        return Text(f"{size(left).at(PRODUCT)} % {size(right).at(UNARY)}", PRODUCT)
    if name in ("Max", "Min"):
        return Text(f"{name.lower()}({', '.join(size(a).source for a in expr.args)})")
    if name == "floor":
        return _divided(*expr.args[0].as_numer_denom())
    raise PlanError(f"the size {expr} has no form in the emitted program: derive it from shapes with +, -, *, //, %")


# --------------------------------------------------------------------------------
# Literals


def literal(value: Any) -> str:
    if isinstance(value, sympy.Basic):
        return size_text(value)
    if isinstance(value, list | tuple):
        inner = ", ".join(literal(v) for v in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return str(value)


def attribute(path: str) -> str:
    """A dotted path as what follows `self`: ".layers[3].mlp.weight" for "layers.3.mlp.weight"."""
    return "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path.split("."))
