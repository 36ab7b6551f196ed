"""Matrix products: the ops whose work tensor parallelism divides."""

import torch
from torch import fx

from ..ir.graph import info, node_inputs
from .factor import Rule, RuleMaker, aligned, einsum

aten = torch.ops.aten

_LINEAR = (frozenset({0}), frozenset({1}))


def _matmul(node: fx.Node) -> Rule:
    """`x[*b m k] y[*b k n] -> z[*b m n]`; the batch dims broadcast, and a vector has k alone."""
    x, y = (info(n).shape for n in node_inputs(node))
    rows, columns = ("m",) * (len(x) > 1), ("n",) * (len(y) > 1)
    batch = info(node).shape[: len(info(node).shape) - len(rows) - len(columns)]
    return Rule(
        ((*aligned(x[:-2], batch), *rows, "k"), (*aligned(y[:-2], batch), "k", *columns)),
        (*aligned(batch, batch), *rows, *columns),
        linear=_LINEAR,
        kind="matmul",
        saves=(0, 1),
    )


RULES: dict[object, RuleMaker] = {
    aten.linear.default: einsum("x[*b i] w[o i] -> y[*b o]", linear=("x", "w"), kind="matmul", saves="x w"),
    aten.matmul.default: _matmul,
    aten.bmm.default: einsum("x[b m k] y[b k n] -> z[b m n]", linear=("x", "y"), kind="matmul", saves="x y"),
    aten.mm.default: einsum("x[m k] y[k n] -> z[m n]", linear=("x", "y"), kind="matmul", saves="x y"),
}
