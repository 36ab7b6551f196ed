"""Matrix products: the ops whose work tensor parallelism divides."""

import sympy
import torch
from torch import fx

from ..ir.graph import Shape, info, node_inputs
from .factor import Dims, Rule, RuleMaker, aligned, einsum

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


def _einsum(node: fx.Node) -> Rule:
    """Letters are factors; one that is absent from the result is summed over; `...` stands for leading dims."""
    equation, operands = str(node.args[0]).replace(" ", ""), node_inputs(node)
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow:  # the implicit form: letters that occur once, in order
        right = "".join(sorted(c for c in set(left) - {",", "."} if left.count(c) == 1))
        right = ("..." if "..." in left else "") + right
    result = info(node).shape
    shared = result[: len(result) - len(right.replace("...", ""))]  # what the dots stand for
    inputs = tuple(_letters(term, info(o).shape, shared) for term, o in zip(terms, operands, strict=True))
    sizes: dict[str, sympy.Expr] = {}
    for dims, operand in zip(inputs, operands, strict=True):
        for factor, size in zip(dims, info(operand).shape, strict=True):
            if factor is not None and (factor not in sizes or sizes[factor] == 1):
                sizes[factor] = size
    # A dim of size 1 broadcasts, and a letter twice in a term is a diagonal.
    inputs = tuple(
        tuple(
            f if f is not None and n == sizes[f] and n != 1 else None for f, n in zip(dims, info(o).shape, strict=True)
        )
        for dims, o in zip(inputs, operands, strict=True)
    )
    whole = frozenset(c for term in terms for c in term if term.count(c) > 1 and c != ".")
    linear = tuple(frozenset({i}) for i in range(len(operands)))
    output = _letters(right, result, shared)
    return Rule(inputs, output, whole, linear=linear, kind="matmul", saves=tuple(range(len(operands))))


def _letters(term: str, shape: Shape, shared: Shape) -> Dims:
    before, dots, after = term.partition("...")
    count = len(shape) - len(before) - len(after)
    middle = aligned(shape[len(before) : len(before) + count], shared) if dots else ()
    return (*before, *middle, *after)


RULES: dict[object, RuleMaker] = {
    aten.linear.default: einsum("x[*b i] w[o i] -> y[*b o]", linear=("x", "w"), kind="matmul", saves="x w"),
    aten.matmul.default: _matmul,
    aten.mv.default: _matmul,
    aten.dot.default: _matmul,
    aten.einsum.default: _einsum,
    aten.bmm.default: einsum("x[b m k] y[b k n] -> z[b m n]", linear=("x", "y"), kind="matmul", saves="x y"),
    aten.mm.default: einsum("x[m k] y[k n] -> z[m n]", linear=("x", "y"), kind="matmul", saves="x y"),
}
