"""Pieces of Python source: expressions with their precedence, sizes, literals, names of the user's model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from ..errors import PlanError
from ..ir.identifiers import is_index, is_plain, printable

COMPARISON, SUM, PRODUCT, UNARY, ATOM = 0, 1, 2, 3, 4


@dataclass(frozen=True)
class Text:
    """Source of an expression, and the precedence of its outermost operator."""

    source: str
    precedence: int = ATOM

    def at(self, precedence: int) -> str:
        """The source as an operand of an operator of that precedence: in parentheses where it binds less."""
        return self.source if self.precedence >= precedence else f"({self.source})"


Render = Callable[[Any], Text]
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_EXTREMES = {
    getattr(torch.finfo(dtype), end): f"torch.finfo({dtype}).{end}" for dtype in _DTYPES for end in ("min", "max")
}
_PLAIN = (bool, int, float, complex, torch.dtype, torch.device, torch.layout, torch.memory_format)


# --------------------------------------------------------------------------------
# Sizes


def size_text(value: Any) -> str:
    """A local size: `s // 2`, `b * s`, 64."""
    return size(value).source


def size_from(text: str, size: sympy.Expr, symbol: sympy.Symbol) -> str:
    """`b` or `s` as source, of which `text` is a size a·s + c: "(x.shape[1] - 4) // 2"."""
    size = sympy.expand(size)
    times, more = size.coeff(symbol), size.subs(symbol, 0)
    source = size_text(sympy.Symbol(text) - more)
    source = f"({source})" if more and times != 1 else source
    over, under = (1 / times).as_numer_denom()
    return source + (f" * {over}" if over != 1 else "") + (f" // {under}" if under != 1 else "")


def size(value: Any) -> Text:
    """A size with its precedence. Fractions are exact divisions: a shard's share of a dim that tp divides."""
    expr: Any = sympy.sympify(value, strict=True)  # strict: text would be evaluated
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
        return tuple_of([literal(v) for v in value])
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, float) and value in _EXTREMES:
        return _EXTREMES[value]
    if value is None or isinstance(value, _PLAIN):
        return str(value)
    raise PlanError(f"{value!r} has no form in the emitted program: pass numbers, strings, or tuples or dicts of them")


def tuple_of(expressions: Sequence[str]) -> str:
    """Source of a tuple of expressions."""
    return f"({expressions[0]},)" if len(expressions) == 1 else f"({', '.join(expressions)})"


def sizes_text(shape: Sequence[Any]) -> str:
    """Source of a tuple of sizes: a shape."""
    return tuple_of([size_text(size) for size in shape])


def tuple_text(items: Sequence[str]) -> str:
    """Source of a tuple of strings."""
    return tuple_of([quoted(item) for item in items])


# --------------------------------------------------------------------------------
# Names of the user's model: strings, attributes, docstrings and markdown, whatever is in them


def quoted(text: str) -> str:
    """A string literal on one line, between double quotes."""
    inside = repr(f'"{text}')[2:-1]  # for the quote in it, repr puts it between single ones
    return '"' + inside.replace("\\'", "'").replace('"', '\\"') + '"'


def attribute(path: str, kind: str) -> str:
    """A "submodule", "parameter" or "buffer" of `self`: self.layers[3].weight, or self.get_parameter("a-b.weight").

    A child of the class itself is in no container, and has no index.
    """
    first, *rest = path.split(".")
    if is_plain(first) and all(map(is_plain_part, rest)):
        return "self." + first + "".join(f"[{part}]" if is_index(part) else f".{part}" for part in rest)
    return f"self.get_{kind}({quoted(path)})"


def is_plain_part(part: str) -> bool:
    """Whether a part of a path stands in source as it is: as an attribute, or an index."""
    return is_plain(part) or is_index(part)


def docstring(first: str, rows: Sequence[str] = ()) -> list[str]:
    """The lines of a docstring: one line, or one and rows below it."""
    lines = [commented(line) for line in (first, *([""] if rows else []), *rows)]
    return [f'"""{lines[0]}', *lines[1:], '"""'] if rows else [f'"""{lines[0]}"""']


def commented(line: str) -> str:
    """Text that stays one line of a comment or docstring, and does not end it."""
    return printable(line).replace("\n", "\\n").replace("\\", "\\\\").replace('"', "'")


def fenced(text: str) -> str:
    """A block of code in markdown, which no row of backticks in it ends."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"
