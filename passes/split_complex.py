"""Complex numbers as pairs of real ones, in a last dim of 2: rotary embeddings as Meta writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from autopar.ir.build import call, eliminate_dead, replace_node
from autopar.ir.graph import MODEL, Program, Shape, arguments, info
from autopar.plan.plan import Plan
from autopar.rules.verify import Level

aten = torch.ops.aten
_Pairs = Mapping[fx.Node, fx.Node]
_PARTS = {aten.view_as_real.default: None, aten.real.default: 0, aten.imag.default: 1}  # → the half; None: both


@dataclass(frozen=True)
class SplitComplex:
    """Each complex value becomes its pair, and its products are written out.

    Requires: `clean`. Ensures: no complex values but tables; a program with an op on complex values that has no form
    here (a Fourier transform, a factor of 1j, a cast) stays as it is.

        z = view_as_complex(x)               |   a, b, c, d = select(x, -1, 0), …, cos(t), sin(t)
        y = view_as_real(mul(z, polar(1, t)))  |   y = stack([a·c − b·d, a·d + b·c], -1)
    """

    name: ClassVar[str] = "split_complex"
    leaves: ClassVar[Level] = Level.TRACED

    def apply(self, program: Program, plan: Plan | None) -> Program:
        used = [node for _, node in program.each_op() if _touches_complex(node)]
        if not used or not all(map(_has_form, used)):
            return program
        program = program.copy_blocks()
        graph, pairs = program.blocks[MODEL].graph, dict[fx.Node, fx.Node]()
        first = next(node for node in graph.nodes if node.op != "placeholder")
        for node in [n for n in graph.nodes if n.op != "output"]:
            with graph.inserting_before(first if node.op == "placeholder" else node):
                if node.target in _PARTS:
                    pair, half = pairs[arguments(node)[0]], _PARTS[node.target]
                    replace_node(node, pair if half is None else _half(node, pair, half))
                elif info(node).dtype.is_complex:
                    pairs[node] = _table(node) if node.op == "placeholder" else _FORMS[node.target](node, pairs)
        eliminate_dead(graph)
        return program


def _touches_complex(node: fx.Node) -> bool:
    return any(info(n).dtype.is_complex for n in (node, *node.all_input_nodes))


def _has_form(node: fx.Node) -> bool:
    return node.target in _FORMS.keys() | _PARTS.keys() and not any(isinstance(value, complex) for value in node.args)


def _made(node: fx.Node, target: Any, args: tuple[Any, ...], dtype: torch.dtype, shape: Shape) -> fx.Node:
    """A real op in the place of `node`."""
    return call(node.graph, target, args, replace(info(node), dtype=dtype), shape)


def _table(node: fx.Node) -> fx.Node:
    """The pairs of a table of the model's."""
    dtype = torch.float64 if info(node).dtype == torch.complex128 else torch.float32
    return _made(node, aten.view_as_real.default, (node,), dtype, (*info(node).shape, sympy.Integer(2)))


def _half(node: fx.Node, pair: fx.Node, index: int) -> fx.Node:
    """The real (0) or imaginary (1) parts."""
    facts = info(pair)
    return _made(node, aten.select.int, (pair, len(facts.shape) - 1, index), facts.dtype, facts.shape[:-1])


def _pair(node: fx.Node, real: fx.Node, imaginary: fx.Node) -> fx.Node:
    shape = info(node).shape
    parts = ([real, imaginary], len(shape))
    return _made(node, aten.stack.default, parts, info(real).dtype, (*shape, sympy.Integer(2)))


def _arithmetic(node: fx.Node, target: Any, one: fx.Node, other: fx.Node) -> fx.Node:
    dtype = torch.promote_types(info(one).dtype, info(other).dtype)
    return _made(node, target, (one, other), dtype, info(node).shape)


def _given(node: fx.Node, pairs: _Pairs) -> fx.Node:
    """view_as_complex: its operand is pairs."""
    pair: fx.Node = arguments(node)[0]
    return pair


def _polar(node: fx.Node, pairs: _Pairs) -> fx.Node:
    length, angle = arguments(node)
    shape, dtype = info(angle).shape, info(angle).dtype
    turned = (_made(node, target, (angle,), dtype, shape) for target in (aten.cos.default, aten.sin.default))
    return _pair(node, *(_arithmetic(node, aten.mul.Tensor, length, part) for part in turned))


def _product(node: fx.Node, pairs: _Pairs) -> fx.Node:
    one, other = arguments(node)
    if one not in pairs:
        one, other = other, one
    shape = (*info(node).shape, sympy.Integer(2))
    if other not in pairs:  # by a number, or by real numbers
        pair, real = pairs[one], other
        if isinstance(other, fx.Node):
            facts = info(other)
            real = _made(node, aten.unsqueeze.default, (other, len(facts.shape)), facts.dtype,
                         (*facts.shape, sympy.Integer(1)))  # fmt: skip
        return _made(node, aten.mul.Tensor, (pair, real), info(pair).dtype, shape)
    (a, b), (c, d) = ([_half(node, pairs[z], i) for i in (0, 1)] for z in (one, other))
    ac, bd, ad, bc = (_arithmetic(node, aten.mul.Tensor, x, y) for x, y in ((a, c), (b, d), (a, d), (b, c)))
    return _pair(node, _arithmetic(node, aten.sub.Tensor, ac, bd), _arithmetic(node, aten.add.Tensor, ad, bc))


def _resized(node: fx.Node, pairs: _Pairs) -> fx.Node:
    """reshape, expand: to a list of sizes."""
    pair, shape = pairs[arguments(node)[0]], (*info(node).shape, sympy.Integer(2))
    return _made(node, node.target, (pair, list(shape)), info(pair).dtype, shape)


def _of_dims(count: int) -> Callable[[fx.Node, _Pairs], fx.Node]:
    """Ops on dims of the complex value, their `count` arguments after it, which may count from the end."""

    def form(node: fx.Node, pairs: _Pairs) -> fx.Node:
        operand, *rest = arguments(node)
        rank = len(info(operand).shape) + (node.target is aten.unsqueeze.default)
        dims = [dim % rank for dim in rest[:count]]
        shape = (*info(node).shape, sympy.Integer(2))
        return _made(node, node.target, (pairs[operand], *dims, *rest[count:]), info(pairs[operand]).dtype, shape)

    return form


_FORMS: dict[Any, Callable[[fx.Node, _Pairs], fx.Node]] = {
    aten.view_as_complex.default: _given,
    aten.polar.default: _polar,
    aten.mul.Tensor: _product,
    aten.reshape.default: _resized,
    aten.expand.default: _resized,
    aten.unsqueeze.default: _of_dims(1),
    aten.slice.Tensor: _of_dims(1),
    aten.select.int: _of_dims(1),
    aten.transpose.int: _of_dims(2),
}
