"""Whether an op without a rule works on each sample by itself, found by running it.

On a data axis the batch is cut. An op of which nothing is known is tried on random values of its operands' shapes, at
two sizes of the batch: where the result for the whole is that of two halves put together, gradients too, it passes
the batch. This is evidence, not proof: an op whose samples meet only on rare values would pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from ..ir.graph import B, S, Shape, info, node_inputs
from .arguments import is_torch_op

_SIZES: tuple[dict[sympy.Symbol, int], ...] = ({B: 4, S: 6}, {B: 6, S: 4})
_SAMPLES_ONLY = (torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_MOST = 1 << 22  # elements of an operand: a trial takes milliseconds
_known: dict[Any, bool] = {}


def is_batchwise(node: fx.Node) -> bool:
    """Whether an op of torch passes the batch on dim 0 of its result, and of each operand that has it."""
    operands = [info(n) for n in node_inputs(node)]
    target: Any = node.target
    if not is_torch_op(target) or any(tag in target.tags for tag in _SAMPLES_ONLY):
        return False
    if not all(_on_dim_0(o.shape) for o in [*operands, info(node)]) or not _has_batch(info(node).shape):
        return False
    key = (target, str(node.args), str(node.kwargs), tuple((o.shape, o.dtype) for o in operands))
    if key not in _known:
        try:
            _known[key] = all(_agrees(node, sizes) for sizes in _SIZES)
        except Exception:  # noqa: BLE001 - an op that cannot be run on the CPU with such values is not known to
            _known[key] = False
    return _known[key]


def _has_batch(shape: Shape) -> bool:
    return bool(shape) and shape[0] == B


def _on_dim_0(shape: Shape) -> bool:
    """Whether the batch is dim 0, or nowhere."""
    first = not shape or shape[0] == B or B not in shape[0].free_symbols
    return first and not any(B in n.free_symbols for n in shape[1:])


def _agrees(node: fx.Node, sizes: Mapping[sympy.Symbol, int]) -> bool:
    operands = [_draw(node, n, sizes) for n in dict.fromkeys(node_inputs(node))]
    half = sizes[B] // 2
    whole = _run(node, operands, sizes)
    parts = []
    for start in (0, half):
        cut = [
            x[start : start + half].detach().requires_grad_(x.requires_grad) if _has_batch(info(n).shape) else x
            for n, x in zip(dict.fromkeys(node_inputs(node)), operands, strict=True)
        ]
        parts.append(_run(node, cut, {**sizes, B: half}))
    return all(
        torch.allclose(_parts(a), _parts(b), rtol=1e-4, atol=1e-5, equal_nan=True)
        for a, b in zip(whole, _joined(node, parts), strict=True)
    )


def _joined(node: fx.Node, parts: list[list[Tensor]]) -> list[Tensor]:
    """Result and gradients of the halves as those of the whole: batches end to end, the others' gradients summed."""
    shapes = [info(node).shape, *(info(n).shape for n in dict.fromkeys(node_inputs(node)) if info(n).requires_grad)]
    return [torch.cat([a, b]) if _has_batch(shape) else a + b for shape, a, b in zip(shapes, *parts, strict=True)]


def _draw(node: fx.Node, operand: fx.Node, sizes: Mapping[sympy.Symbol, int]) -> Tensor:
    facts = info(operand)
    shape = [int(n.subs(dict(sizes))) for n in facts.shape]
    if torch.Size(shape).numel() > _MOST:
        raise ValueError("too large to be tried")
    generator = torch.Generator().manual_seed(len(shape))
    if facts.dtype.is_floating_point:
        dtype = torch.float64 if facts.dtype == torch.float64 else torch.float32
        return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(facts.requires_grad)
    return torch.randint(2, shape, generator=generator).to(facts.dtype)


def _run(node: fx.Node, operands: list[Tensor], sizes: Mapping[sympy.Symbol, int]) -> list[Tensor]:
    """The result, then the gradient of each operand that has one, of a sum weighted by the sample's values."""
    values = dict(zip(dict.fromkeys(node_inputs(node)), operands, strict=True))

    def real(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return values[argument]
        if isinstance(argument, sympy.Expr):
            return int(argument.subs(dict(sizes)))
        if isinstance(argument, list | tuple):
            return type(argument)(map(real, argument))
        return argument

    target: Any = node.target
    result: Tensor = target(*map(real, node.args), **{k: real(v) for k, v in node.kwargs.items()})
    if tuple(result.shape) != tuple(int(n.subs(dict(sizes))) for n in info(node).shape):
        raise ValueError("another shape than in the trace")
    leaves = [x for x in operands if x.requires_grad]
    if not leaves or not result.requires_grad:
        return [result.detach()]
    weights = torch.cos(torch.arange(result[0].numel(), dtype=result.dtype)).reshape(result[0].shape)
    weighed = _parts((result * weights).sum()).sum()
    return [result.detach(), *torch.autograd.grad(weighed, leaves, materialize_grads=True)]


def _parts(x: Tensor) -> Tensor:
    """Of complex numbers the parts."""
    return (torch.view_as_real(x) if x.is_complex() else x).double()
