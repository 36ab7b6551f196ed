"""Pieces of Python source: expressions with their precedence, sizes, literals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy

SUM, PRODUCT, UNARY, ATOM = 1, 2, 3, 4


@dataclass(frozen=True)
class Text:
    """Source of an expression, the precedence of its outermost operator, and the names it imports."""

    source: str
    precedence: int = ATOM
    imports: frozenset[str] = frozenset()

    def at(self, precedence: int) -> str:
        return self.source if self.precedence >= precedence else f"({self.source})"


Render = Callable[[Any], Text]


def size_text(size: Any) -> str:
    """A local size: `s // 2`, `b * s`, 64."""
    expr = sympy.sympify(size)
    numerator, denominator = expr.as_numer_denom()
    text = str(numerator).replace("*", " * ")
    return text if denominator == 1 else f"{text if numerator.is_Symbol else f'({text})'} // {denominator}"


def literal(value: Any) -> str:
    if isinstance(value, sympy.Basic):
        return size_text(value)
    if isinstance(value, list | tuple):
        inner = ", ".join(literal(v) for v in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value)
