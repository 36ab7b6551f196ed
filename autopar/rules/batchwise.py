"""Whether an op without a rule works on each sample by itself, found by running it.

On a data axis the batch is cut. An op of which nothing is known is tried on random values of its operands' shapes, at
two sizes of the batch: where the result for the whole is that of two halves put together, gradients too, it passes
the batch. This is evidence, not proof: an op whose samples meet only on rare values would pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from ..ir.graph import B, S, Shape, info, node_inputs
from .arguments import is_torch_op

_SIZES: tuple[dict[sympy.Symbol, int], ...] = ({B: 4, S: 6}, {B: 6, S: 4})
_SAMPLES_ONLY = (torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_MOST = 1 << 22  # elements of an operand: a trial takes milliseconds


@dataclass(frozen=True)
class _Value:
    """What a trial depends on of an operand: a tensor of these facts is drawn for it."""

    shape: Shape
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class _Op:
    """An op apart from its graph: in its arguments each operand is its place among `operands`."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    operands: tuple[_Value, ...]
    shape: Shape


@dataclass(frozen=True)
class _Operand:
    place: int


def is_batchwise(node: fx.Node) -> bool:
    """Whether an op of torch passes the batch on dim 0 of its result, and of each operand that has it."""
    target: Any = node.target
    if not is_torch_op(target) or any(tag in target.tags for tag in _SAMPLES_ONLY):
        return False
    if not all(_on_dim_0(info(n).shape) for n in [*node_inputs(node), node]) or not _has_batch(info(node).shape):
        return False
    return _passes_batch(_op(node))


def _op(node: fx.Node) -> _Op:
    operands = list(dict.fromkeys(node_inputs(node)))

    def fixed(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return _Operand(operands.index(argument))
        return tuple(map(fixed, argument)) if isinstance(argument, list | tuple) else argument

    values = tuple(_Value(info(n).shape, info(n).dtype, info(n).requires_grad) for n in operands)
    kwargs = tuple((name, fixed(argument)) for name, argument in node.kwargs.items())
    return _Op(node.target, fixed(node.args), kwargs, values, info(node).shape)


@lru_cache(maxsize=1024)  # what is tried is all in `op`: the answer is the same for each model that has it
def _passes_batch(op: _Op) -> bool:
    try:
        return all(_agrees(op, sizes) for sizes in _SIZES)
    except Exception:  # noqa: BLE001 - an op that cannot be run on the CPU with such values is not known to
        return False


def _has_batch(shape: Shape) -> bool:
    return bool(shape) and shape[0] == B


def _on_dim_0(shape: Shape) -> bool:
    """Whether the batch is dim 0, or nowhere."""
    first = not shape or shape[0] == B or B not in shape[0].free_symbols
    return first and not any(B in n.free_symbols for n in shape[1:])


def _agrees(op: _Op, sizes: Mapping[sympy.Symbol, int]) -> bool:
    operands = [_draw(value, sizes) for value in op.operands]
    half = sizes[B] // 2
    whole = _run(op, operands, sizes)
    parts = []
    for start in (0, half):
        cut = [
            x[start : start + half].detach().requires_grad_(x.requires_grad) if _has_batch(value.shape) else x
            for value, x in zip(op.operands, operands, strict=True)
        ]
        parts.append(_run(op, cut, {**sizes, B: half}))
    return all(
        torch.allclose(_parts(a), _parts(b), rtol=1e-4, atol=1e-5, equal_nan=True)
        for a, b in zip(whole, _joined(op, parts), strict=True)
    )


def _joined(op: _Op, parts: list[list[Tensor]]) -> list[Tensor]:
    """Result and gradients of the halves as those of the whole: batches end to end, the others' gradients summed."""
    shapes = [op.shape, *(value.shape for value in op.operands if value.requires_grad)]
    return [torch.cat([a, b]) if _has_batch(shape) else a + b for shape, a, b in zip(shapes, *parts, strict=True)]


def _draw(value: _Value, sizes: Mapping[sympy.Symbol, int]) -> Tensor:
    shape = [int(n.subs(dict(sizes))) for n in value.shape]
    if torch.Size(shape).numel() > _MOST:
        raise ValueError("too large to be tried")
    generator = torch.Generator().manual_seed(len(shape))
    if value.dtype.is_floating_point:
        dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
        return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(value.requires_grad)
    return torch.randint(2, shape, generator=generator).to(value.dtype)


def _run(op: _Op, operands: list[Tensor], sizes: Mapping[sympy.Symbol, int]) -> list[Tensor]:
    """The result, then the gradient of each operand that has one, of a sum weighted by the sample's values."""

    def real(argument: Any) -> Any:
        if isinstance(argument, _Operand):
            return operands[argument.place]
        if isinstance(argument, sympy.Expr):
            return int(argument.subs(dict(sizes)))
        return [real(a) for a in argument] if isinstance(argument, tuple) else argument

    result: Tensor = op.target(*map(real, op.args), **{name: real(argument) for name, argument in op.kwargs})
    if tuple(result.shape) != tuple(int(n.subs(dict(sizes))) for n in op.shape):
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
