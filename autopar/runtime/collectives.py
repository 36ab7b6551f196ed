"""The conversions between placements, each with its backward (DESIGN: the table of conversions).

Each public function is one row of that table: what it does to the value, then what its backward does to the
gradient. `axis` names a mesh axis, `dim` a dim of the tensor; on an axis of size one every function returns
its input. Sharded dims divide evenly: the emitter guarantees it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .mesh import current

_Map = Callable[[Tensor], Tensor]


def copy_to(x: Tensor, axis: str) -> Tensor:
    """Replicate → Replicate, grad Partial."""
    return _convert(x, axis, _same, _sum(axis))


def split(x: Tensor, dim: int, axis: str) -> Tensor:
    """Replicate → Shard(dim)."""
    return _convert(x, axis, _slice(dim, axis), _gather(dim, axis))


def gather(x: Tensor, dim: int, axis: str) -> Tensor:
    """Shard(dim) → Replicate."""
    return _convert(x, axis, _gather(dim, axis), _slice(dim, axis))


def all_gather(x: Tensor, dim: int, axis: str) -> Tensor:
    """Shard(dim) → Replicate, grad Partial."""
    return _convert(x, axis, _gather(dim, axis), _reduce_scatter(dim, axis))


def all_reduce(x: Tensor, axis: str) -> Tensor:
    """Partial → Replicate."""
    return _convert(x, axis, _sum(axis), _same)


def reduce_scatter(x: Tensor, dim: int, axis: str) -> Tensor:
    """Partial → Shard(dim)."""
    return _convert(x, axis, _reduce_scatter(dim, axis), _gather(dim, axis))


def all_to_all(x: Tensor, from_dim: int, to_dim: int, axis: str) -> Tensor:
    """Shard(from_dim) → Shard(to_dim)."""
    return _convert(x, axis, _exchange(from_dim, to_dim, axis), _exchange(to_dim, from_dim, axis))


def take_shard(x: Tensor, dim: int, axis: str) -> Tensor:
    """Replicate, grad Partial → Shard(dim)."""
    return _convert(x, axis, _slice(dim, axis), _pad(dim, axis))


def grad_from_first(x: Tensor, axis: str) -> Tensor:
    """Replicate, grad Partial → Replicate."""
    return _convert(x, axis, _same, _first(axis))


def value_from_first(x: Tensor, axis: str) -> Tensor:
    """Replicate → Partial."""
    return _convert(x, axis, _first(axis), _same)


def all_reduce_both(x: Tensor, axis: str) -> Tensor:
    """Partial → Replicate, grad Partial."""
    return _convert(x, axis, _sum(axis), _sum(axis))


def both_from_first(x: Tensor, axis: str) -> Tensor:
    """Replicate, grad Partial → Partial."""
    return _convert(x, axis, _first(axis), _first(axis))


def pad_shard(x: Tensor, dim: int, axis: str) -> Tensor:
    """Shard(dim) → Partial."""
    return _convert(x, axis, _pad(dim, axis), _slice(dim, axis))


class _Convert(torch.autograd.Function):
    """A linear map of the value, and another of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: _Map, gradient: _Map) -> Tensor:
        ctx.gradient = gradient
        return value(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient(grads[0]), None, None


def _convert(x: Tensor, axis: str, value: _Map, gradient: _Map) -> Tensor:
    if current().size(axis) == 1:
        return x
    converted: Tensor = _Convert.apply(x, value, gradient)  # type: ignore[no-untyped-call]
    return converted


# The maps. A tensor given to one may be in use elsewhere, so none is changed in place.


def _same(x: Tensor) -> Tensor:
    return x


def _sum(axis: str) -> _Map:
    def run(x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=current().group(axis))
        return total

    return run


def _slice(dim: int, axis: str) -> _Map:
    def run(x: Tensor) -> Tensor:
        mesh = current()
        # A copy: a view would keep the whole tensor alive for as long as its slice.
        return x.chunk(mesh.size(axis), dim)[mesh.rank(axis)].clone(memory_format=torch.contiguous_format)

    return run


def _gather(dim: int, axis: str) -> _Map:
    def run(x: Tensor) -> Tensor:
        size = current().size(axis)
        parts = x.new_empty((size * x.shape[0], *x.shape[1:]))
        all_gather_flat(parts, x.contiguous(), current().group(axis))
        return parts if dim == 0 else torch.cat(parts.chunk(size), dim)

    return run


def _reduce_scatter(dim: int, axis: str) -> _Map:
    def run(x: Tensor) -> Tensor:
        size = current().size(axis)
        parts = x.contiguous() if dim == 0 else torch.cat(x.chunk(size, dim))
        out = parts.new_empty((parts.shape[0] // size, *parts.shape[1:]))
        reduce_scatter_flat(out, parts, current().group(axis))
        return out

    return run


def _exchange(from_dim: int, to_dim: int, axis: str) -> _Map:
    def run(x: Tensor) -> Tensor:
        size = current().size(axis)
        parts = torch.cat(x.chunk(size, to_dim))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=current().group(axis))
        return torch.cat(received.chunk(size), from_dim)

    return run


def _first(axis: str) -> _Map:
    return lambda x: x if current().rank(axis) == 0 else torch.zeros_like(x)


def _pad(dim: int, axis: str) -> _Map:
    def run(x: Tensor) -> Tensor:
        mesh, size = current(), x.shape[dim]
        whole = list(x.shape)
        whole[dim] = size * mesh.size(axis)
        padded = x.new_zeros(whole)
        padded.narrow(dim, mesh.rank(axis) * size, size).copy_(x)
        return padded

    return run


def all_gather_flat(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    """`out` = the x of each rank, one after the other."""
    # torch 2.13 renamed the two flat collectives and deprecates the old names.
    run = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    run(out, x, group=group)


def reduce_scatter_flat(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    """`out` = this rank's part of the sum of x over the ranks."""
    run = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    run(out, x, group=group)
