"""Numbers that the author computes from sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
from torch import fx

from ..errors import TraceError
from ..ir.graph import B, S
from .source import place


def float_of_sizes(node: fx.Node, symbols: Mapping[Any, Any]) -> Any:
    """A float of the exported graph as a polynomial of sizes, as whole numbers are; raises TraceError for others.

    `symbols`: export's symbol → ours. A quotient would be written as one of whole numbers, which it is not.
    """
    value = node.meta["val"]
    if isinstance(value, float):
        return value
    expr = value.node.expr.replace(lambda e: e.func.__name__ == "ToFloat", lambda e: e.args[0])
    expr = sympy.nsimplify(expr.subs(symbols), rational=True)
    if not expr.is_polynomial(B, S) or expr.free_symbols - {B, S} or sympy.denom(sympy.together(expr)) != 1:
        raise TraceError(
            f"{expr} is a float of sizes{place(node)}: divide a tensor by the size instead (y / x.shape[0])"
        )
    return expr
