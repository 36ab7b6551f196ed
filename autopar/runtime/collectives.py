"""The conversions between placements, each with its backward (DESIGN: the table of conversions).

Each public function is one row of that table: what it does to the value, then what its backward does to the
gradient. `axis` names a mesh axis, `dim` a dim of the tensor; on an axis of size one every function returns
its input. Sharded dims divide evenly: the emitter guarantees it. Where the sequence is cut in zigzag over cp
(see `settings`), so are all shards on cp, for no other dim is sharded there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import current

_Map = Callable[[Tensor, str], Tensor]  # (tensor, axis) → tensor
# torch 2.13 renamed the flat collectives and deprecates the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_sum_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_to(x: Tensor, axis: str) -> Tensor:
    """Replicate → Replicate, grad Partial."""
    return _convert(x, axis, _same, _sum)


def split(x: Tensor, dim: int, axis: str) -> Tensor:
    """Replicate → Shard(dim)."""
    return _convert(x, axis, partial(_slice, dim), partial(_gather, dim))


def gather(x: Tensor, dim: int, axis: str) -> Tensor:
    """Shard(dim) → Replicate."""
    return _convert(x, axis, partial(_gather, dim), partial(_slice, dim))


def all_gather(x: Tensor, dim: int, axis: str) -> Tensor:
    """Shard(dim) → Replicate, grad Partial."""
    return _convert(x, axis, partial(_gather, dim), partial(_reduce_scatter, dim))


def all_reduce(x: Tensor, axis: str) -> Tensor:
    """Partial → Replicate."""
    return _convert(x, axis, _sum, _same)


def reduce_scatter(x: Tensor, dim: int, axis: str) -> Tensor:
    """Partial → Shard(dim)."""
    return _convert(x, axis, partial(_reduce_scatter, dim), partial(_gather, dim))


def all_to_all(x: Tensor, from_dim: int, to_dim: int, axis: str) -> Tensor:
    """Shard(from_dim) → Shard(to_dim)."""
    return _convert(x, axis, partial(_exchange, from_dim, to_dim), partial(_exchange, to_dim, from_dim))


def take_shard(x: Tensor, dim: int, axis: str) -> Tensor:
    """Replicate, grad Partial → Shard(dim)."""
    return _convert(x, axis, partial(_slice, dim), partial(_pad, dim))


def grad_from_first(x: Tensor, axis: str) -> Tensor:
    """Replicate, grad Partial → Replicate."""
    return _convert(x, axis, _same, _first)


def value_from_first(x: Tensor, axis: str) -> Tensor:
    """Replicate → Partial."""
    return _convert(x, axis, _first, _same)


def all_reduce_both(x: Tensor, axis: str) -> Tensor:
    """Partial → Replicate, grad Partial."""
    return _convert(x, axis, _sum, _sum)


def both_from_first(x: Tensor, axis: str) -> Tensor:
    """Replicate, grad Partial → Partial."""
    return _convert(x, axis, _first, _first)


def pad_shard(x: Tensor, dim: int, axis: str) -> Tensor:
    """Shard(dim) → Partial."""
    return _convert(x, axis, partial(_pad, dim), partial(_slice, dim))


def head_of(x: Tensor, axis: str) -> Tensor:
    """The K/V head that this rank's query heads read, where there are fewer K/V heads than ranks.

    x: [batch, heads, tokens, width], whole on every rank. Its gradient is this rank's summand: Replicate, grad Partial.
    """
    return x.narrow(1, current().rank(axis) * x.shape[1] // current().size(axis), 1)


class _Convert(torch.autograd.Function):
    """A linear map of the value, and another of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str, value: _Map, gradient: _Map) -> Tensor:
        ctx.axis, ctx.gradient = axis, gradient
        return value(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.gradient(grads[0], ctx.axis), None, None, None


def _convert(x: Tensor, axis: str, value: _Map, gradient: _Map) -> Tensor:
    alone = current().size(axis) == 1
    return x if alone else _Convert.apply(x, axis, value, gradient)  # type: ignore[no-untyped-call]


# The maps. A tensor given to one may be in use elsewhere, so none is changed in place.


def _same(x: Tensor, axis: str) -> Tensor:
    return x


def _sum(x: Tensor, axis: str) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=current().group(axis))
    return total


def _shards(x: Tensor, dim: int, axis: str) -> list[Tensor]:
    """The shard of each rank, of a tensor that is whole."""
    size = current().size(axis)
    if not _is_zigzag(axis):
        return list(x.chunk(size, dim))
    chunks = x.chunk(2 * size, dim)
    return [torch.cat((chunks[r], chunks[2 * size - 1 - r]), dim) for r in range(size)]


def _join(shards: Sequence[Tensor], dim: int, axis: str) -> Tensor:
    """The whole tensor, of each rank's shard."""
    if not _is_zigzag(axis):
        return torch.cat(tuple(shards), dim)
    pairs = [shard.chunk(2, dim) for shard in shards]
    return torch.cat([first for first, _ in pairs] + [last for _, last in reversed(pairs)], dim)


def _is_zigzag(axis: str) -> bool:
    return axis == "cp" and current().settings.zigzag


def _slice(dim: int, x: Tensor, axis: str) -> Tensor:
    # A copy: a view would keep the whole tensor alive for as long as its slice.
    return _shards(x, dim, axis)[current().rank(axis)].clone(memory_format=torch.contiguous_format)


def _gather(dim: int, x: Tensor, axis: str) -> Tensor:
    size = current().size(axis)
    parts = x.new_empty((size * x.shape[0], *x.shape[1:]))
    _all_gather(parts, x.contiguous(), group=current().group(axis))
    return parts if dim == 0 and not _is_zigzag(axis) else _join(parts.chunk(size), dim, axis)


def _reduce_scatter(dim: int, x: Tensor, axis: str) -> Tensor:
    size = current().size(axis)
    parts = x.contiguous() if dim == 0 and not _is_zigzag(axis) else torch.cat(_shards(x, dim, axis))
    out = parts.new_empty((parts.shape[0] // size, *parts.shape[1:]))
    _sum_scatter(out, parts, group=current().group(axis))
    return out


def _exchange(from_dim: int, to_dim: int, x: Tensor, axis: str) -> Tensor:
    parts = torch.cat(_shards(x, to_dim, axis))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=current().group(axis))
    return _join(received.chunk(current().size(axis)), from_dim, axis)


def _first(x: Tensor, axis: str) -> Tensor:
    return x if current().rank(axis) == 0 else torch.zeros_like(x)


def _pad(dim: int, x: Tensor, axis: str) -> Tensor:
    parts = [torch.zeros_like(x)] * current().size(axis)
    parts[current().rank(axis)] = x
    return _join(parts, dim, axis)
