"""Which dims of a tensor tell `b` and `s`."""

from __future__ import annotations

from typing import Any

import sympy

from .graph import B, S, Shape


def dims_of(shape: Shape) -> dict[Any, int]:
    """The dim that tells `b` and that which tells `s`, alone in a size a·s + c: without a constant, if there is one."""
    found = [
        (size.subs(symbol, 0) == 0, -size.coeff(symbol), symbol, i)
        for i, size in enumerate(map(sympy.expand, shape))
        for symbol in (B, S)
        if size.free_symbols == {symbol} and size.is_polynomial(symbol) and sympy.degree(size, symbol) == 1
    ]
    return {symbol: i for *_, symbol, i in sorted(found, key=lambda item: item[:2])}
