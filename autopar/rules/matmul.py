"""Matrix products: the ops whose work tensor parallelism divides."""

import torch

from .factor import RuleMaker, einsum

aten = torch.ops.aten

RULES: dict[object, RuleMaker] = {
    aten.linear.default: einsum("x[*b i] w[o i] -> y[*b o]", linear=("x", "w"), kind="matmul", saves="x w"),
    aten.matmul.default: einsum("x[*b m k] y[*b k n] -> z[*b m n]", linear=("x", "y"), kind="matmul", saves="x y"),
    aten.bmm.default: einsum("x[b m k] y[b k n] -> z[b m n]", linear=("x", "y"), kind="matmul", saves="x y"),
    aten.mm.default: einsum("x[m k] y[k n] -> z[m n]", linear=("x", "y"), kind="matmul", saves="x y"),
}
