"""Sizes as text, read back: sums, products, quotients and remainders of names and whole numbers, and nothing else."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

_SUMS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {"+": operator.add, "-": operator.sub}
_PRODUCTS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "*": operator.mul, "/": operator.truediv, "//": operator.floordiv, "%": operator.mod,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Fraction]] = {"max": max, "min": min}
_LONGEST = 200  # characters of a size, which is what its depth is bounded by


def read_size(text: str, values: Mapping[str, int]) -> int:
    """The value of a size such as "s // 4 + 1", given those of its names; ValueError where it is none."""
    if not isinstance(text, str) or len(text) > _LONGEST:
        raise ValueError(f"{str(text)[:40]!r} is not a size")
    reader = _Reader(text, values, re.findall(r"//|[0-9]+|[a-z]+|\S", text, re.ASCII))
    try:
        value = reader.sum()
    except ZeroDivisionError as error:
        raise reader.error() from error
    if reader.tokens or value.denominator != 1:
        raise reader.error()
    return int(value)


@dataclass
class _Reader:
    """Reads a sum, a product or an atom from the front of what is left of the tokens."""

    text: str
    values: Mapping[str, int]
    tokens: list[str] = field(default_factory=list)

    def sum(self) -> Fraction:
        return self._chain(_SUMS, self._product)

    def _product(self) -> Fraction:
        return self._chain(_PRODUCTS, self._atom)

    def _chain(
        self, operators: Mapping[str, Callable[[Fraction, Fraction], Fraction]], operand: Callable[[], Fraction]
    ) -> Fraction:
        value = operand()
        while self.tokens and self.tokens[0] in operators:
            value = operators[self.tokens.pop(0)](value, operand())
        return Fraction(value)

    def _atom(self) -> Fraction:
        token = self.tokens.pop(0) if self.tokens else ""
        if token == "-":
            return -self._atom()
        if token == "(":
            return self._closed(self.sum())
        if token in _FUNCTIONS and self.tokens[:1] == ["("]:
            given = []
            while self.tokens[:1] in (["("], [","]):
                self.tokens.pop(0)
                given.append(self.sum())
            return self._closed(_FUNCTIONS[token](given))
        if token in self.values:
            return Fraction(self.values[token])
        if token.isascii() and token.isdecimal():
            return Fraction(int(token))
        raise self.error()

    def _closed(self, value: Fraction) -> Fraction:
        if self.tokens[:1] != [")"]:
            raise self.error()
        self.tokens.pop(0)
        return value

    def error(self) -> ValueError:
        return ValueError(f"{self.text!r} is not a size in terms of {', '.join(self.values)}")
