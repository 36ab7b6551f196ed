"""Keep the author's constants within the range of half precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar

import torch
from torch import fx

from autopar.ir.build import call, eliminate_dead, replace_node
from autopar.ir.graph import MODEL, Program, arguments, info, node_inputs
from autopar.plan.plan import Plan
from autopar.rules import views
from autopar.rules.verify import Level

from .islands import is_half

aten = torch.ops.aten

# op → the places of its numbers that become elements of its result
_FILLS: dict[Any, tuple[int, ...]] = {
    aten.masked_fill.Scalar: (2,), aten.full.default: (1,), aten.full_like.default: (1,), aten.fill.Scalar: (1,),
    aten.where.ScalarOther: (2,), aten.where.ScalarSelf: (1,), aten.where.Scalar: (1, 2), aten.pad.default: (3,),
    aten.constant_pad_nd.default: (2,), aten.scalar_tensor.default: (0,), aten.clamp.default: (1, 2),
    aten.clamp_min.default: (1,), aten.clamp_max.default: (1,),
}  # fmt: skip
_TENSOR_FILLS: dict[Any, tuple[int, ...]] = {aten.masked_fill.Tensor: (2,), aten.where.self: (1, 2)}
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
_COMPLEMENTS = (aten.rsub.Scalar, aten.sub.Tensor, aten.rsub.Tensor, aten.sub.Scalar, aten.neg.default)


@dataclass(frozen=True)
class FitLiterals:
    """A mask of −1e9 is out of fp16's range: torch refuses to fill it in, and a product with it is −inf.

    Requires: a clean program. Ensures: a number that fills half-precision tensors, or multiplies a mask of such, is
    within half of the range, so that a score may still be added to it. A clamp that asks whether the whole batch has
    an inf (T5's) becomes one of each element.

        masked_fill(x, m, -1e9)                              |   masked_fill(x, m, -32752)       (fp16)
        mul(to(m, float16), -1e9)                            |   mul(to(m, float16), -32752)
        c = where(any(isinf(x)), 64504, 65504); clamp(x, -c, c)   |   clamp(x, -64504, 64504)
    """

    name: ClassVar[str] = "fit_literals"
    leaves: ClassVar[Level] = Level.TRACED

    def apply(self, program: Program, plan: Plan | None) -> Program:
        program = program.copy_blocks()
        graph = program.blocks[MODEL].graph
        for node in program.blocks[MODEL].ops:
            if not is_half(node):
                continue
            for place in _literal_places(node):
                node.update_arg(place, _fitted(arguments(node)[place], info(node).dtype))
            _fit_tensors(node)
            if (bounds := _guard_bounds(node)) is not None:
                with graph.inserting_before(node):
                    source = node_inputs(node)[0]
                    replace_node(node, call(graph, aten.clamp.default, (source, *bounds), info(node)))
        eliminate_dead(graph)
        return program


def _literal_places(node: fx.Node) -> Iterator[int]:
    if node.target in _FILLS:
        yield from (place for place in _FILLS[node.target] if place < len(node.args))
    elif node.target in _PRODUCTS and _is_mask(arguments(node)[0]):
        yield 1


def _fitted(value: Any, dtype: torch.dtype) -> Any:
    """A finite number out of the dtype's range as half of its largest; others as they are."""
    largest = torch.finfo(dtype).max
    out = isinstance(value, int | float) and isfinite(value) and abs(value) > largest
    return (largest if value > 0 else -largest) / 2 if out else value


def _fit_tensors(node: fx.Node) -> None:
    """The same where the author fills in a tensor made of one number."""
    for place in _TENSOR_FILLS.get(node.target, ()):
        value = arguments(node)[place]
        if value.target is aten.full.default and (fits := _fitted(value.args[1], info(node).dtype)) != value.args[1]:
            with node.graph.inserting_before(node):
                fitted = call(node.graph, value.target, (value.args[0], fits), info(value), **value.kwargs)
            node.update_arg(place, fitted)


def _is_mask(node: Any) -> bool:
    """Of zeros and ones, or their complement: cast from truth values or whole numbers, without gradient."""
    if not isinstance(node, fx.Node) or info(node).requires_grad:
        return False
    if node.target is aten.to.dtype:
        return not info(node_inputs(node)[0]).dtype.is_floating_point
    passes = node.target in _COMPLEMENTS or node.target in views.RULES
    return node.target is aten.full.default or passes and all(map(_is_mask, node_inputs(node)))


def _guard_bounds(node: fx.Node) -> tuple[float, float] | None:
    """(−c, c) of a clamp of x to ±where(any(isinf(x)), c, …)."""
    if node.target is not aten.clamp.Tensor or len(node_inputs(node)) != 3:
        return None
    source, low, high = node_inputs(node)
    if low.target is not aten.neg.default or low.args[0] is not high or high.target is not aten.where.Scalar:
        return None
    condition, bound, _ = arguments(high)
    seen = condition.target is aten.any.default and condition.args[0].target is aten.isinf.default
    return (-bound, bound) if seen and condition.args[0].args[0] is source else None
