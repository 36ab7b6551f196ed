"""Matrix products: the ops whose work tensor parallelism divides."""

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
    terms, right = _equation(str(node.args[0]).replace(" ", ""))
    shapes, result = [info(operand).shape for operand in node_inputs(node)], info(node).shape
    shared = result[: len(result) - len(right.replace("...", ""))]  # what the dots stand for
    letters = [_letters(term, shape, shared) for term, shape in zip(terms, shapes, strict=True)]
    # A dim of size 1 broadcasts, and a letter twice in a term is a diagonal.
    sizes = {
        f: n for dims, shape in zip(letters, shapes, strict=True) for f, n in zip(dims, shape, strict=True) if n != 1
    }
    inputs = tuple(
        tuple(f if n == sizes.get(f) else None for f, n in zip(dims, shape, strict=True))
        for dims, shape in zip(letters, shapes, strict=True)
    )
    whole = frozenset(c for term in terms for c in term if term.count(c) > 1 and c != ".")
    every = range(len(shapes))
    linear = tuple(frozenset({i}) for i in every)
    return Rule(inputs, _letters(right, result, shared), whole, linear=linear, kind="matmul", saves=tuple(every))


def _equation(equation: str) -> tuple[list[str], str]:
    """The terms of the operands and that of the result; unwritten it has the letters that occur once, in order."""
    left, arrow, right = equation.partition("->")
    if not arrow:
        once = sorted(c for c in set(left) - {",", "."} if left.count(c) == 1)
        right = "..." * ("..." in left) + "".join(once)
    return left.split(","), right


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
