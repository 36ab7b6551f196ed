"""Attention over a sequence that is cut over a mesh axis, in order or zigzag (tiles.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .flash import block_backward, block_forward
from .mesh import current
from .tiles import Layout, hops, ring_tiles, whole_tiles


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: str,
    *,
    is_causal: bool = False,
    zigzag: bool = False,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """q [b, h, s/c, e], k [b, g, s/c, e], v [b, g, s/c, f] of this rank, g dividing h → [b, h, s/c, f].

    K and V, of g heads, go around the ring of ranks, each block while attention to the one before is computed;
    backward they go around once more, and their gradients (in fp32 at least) with them. `window`: a row sees its own
    and the window − 1 keys before it, which needs `is_causal`. No dropout, and no second derivative.
    """
    size = current().size(axis)
    if size == 1:
        return gathered_attention(q, k, v, axis, is_causal=is_causal, zigzag=zigzag, window=window, scale=scale)
    return _attend(q, k, v, axis, Layout(size, q.shape[2], k.shape[2], is_causal, zigzag, window), False, scale)


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: str,
    *,
    is_causal: bool,
    zigzag: bool = False,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """q [b, h, s/c, e] of this rank, k [b, g, s, e] and v [b, g, s, f] whole, in order → [b, h, s/c, f].

    The gradients of k and v are this rank's summands. The rest is as in ring_attention.
    """
    size = current().size(axis)
    layout = Layout(size, q.shape[2], k.shape[2] // size, is_causal, zigzag, window)
    if not is_causal or (size == 1 and window is None):
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    return _attend(q, k, v, axis, layout, True, scale)


class _Attention(torch.autograd.Function):
    """In step t a rank attends to the block of the rank t before it, while the next one comes; `whole`: to all keys.

    Backward, a block's gradients set out a step behind it, from the first rank that it came to; each adds to them,
    and the last sends them home.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: str, layout: Layout, whole: bool, scale: float | None
    ) -> Tensor:
        size, rank, this_block = layout.size, current().rank(axis), [k.contiguous(), v.contiguous()]
        steps, hops_of = [whole_tiles(layout, rank)], [0]  # how often each rank's block is passed on
        if not whole:
            steps = [ring_tiles(layout, rank, (rank - step) % size) for step in range(size)]
            hops_of = [hops(layout, block) for block in range(size)]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out = _zeros(v[:, :1, :1].expand(*q.shape[:3], -1))
        lse, block = torch.full_like(out[..., 0], -torch.inf), this_block
        for step, tiles in enumerate(steps):
            here, coming = (hops_of[(rank - step - i) % len(hops_of)] for i in (0, 1))
            following = _buffers(this_block, step < coming)
            works = _start(axis, [(block if step < here else [], rank + 1)], [(following, rank - 1)])
            for rows, keys, shape in tiles:
                at, of = slice(rows.start, rows.stop), slice(keys.start, keys.stop)
                new_out, new_lse = block_forward(shape, scale, q[:, :, at], *(x[:, :, of] for x in block))
                share = torch.sigmoid(new_lse - lse[:, :, at])  # of one softmax over the keys before and these
                out[:, :, at].lerp_(new_out.to(out.dtype), share[..., None])
                lse[:, :, at] = torch.logaddexp(lse[:, :, at], new_lse)
            _wait(works)
            block = following
        result = out.to(q.dtype)
        ctx.save_for_backward(q, *this_block, result, lse)
        ctx.call = axis, steps, hops_of, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        axis, steps, hops_of, scale = ctx.call
        rank, dq, total = current().rank(axis), _zeros(q), [_zeros(k), _zeros(v)]
        block, grads = [k, v], total
        for step, tiles in enumerate((*steps, ())):
            last, here, coming, homeward = (hops_of[(rank - step - i) % len(hops_of)] for i in (-1, 0, 1, -step))
            before, grads = grads, [_zeros(k), _zeros(v)] if step else total
            following = _buffers([k, v], step < coming)
            onward, home = _buffers(total, 1 < step <= here), _buffers(total, 1 < step == homeward + 1)
            then = rank + 1 if step <= last else rank - step + 1
            works = _start(
                axis,
                [(block if step < here else [], rank + 1), (before if 1 < step <= last + 1 else [], then)],
                [(following, rank - 1), (onward, rank - 1), (home, rank + homeward)],
            )
            for rows, keys, shape in tiles:
                at, of = slice(rows.start, rows.stop), slice(keys.start, keys.stop)
                of_rows, of_keys = (x[:, :, at] for x in (upstream[0], q, out, lse)), (x[:, :, of] for x in block)
                parts = block_backward(shape, scale, *of_rows, *of_keys)
                _add([dq[:, :, at], *(x[:, :, of] for x in grads)], parts)
            _wait(works)
            _add(grads, onward)
            _add(total, home)
            block = following
        return dq.to(q.dtype), total[0].to(k.dtype), total[1].to(v.dtype), None, None, None, None


# One break in a compiled graph: transfers under way are no part of it.
_attend: Callable[..., Tensor] = torch.compiler.disable(_Attention.apply)


def _zeros(x: Tensor) -> Tensor:
    """Zeros of the shape of `x` for a sum: in fp32 at least."""
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _add(totals: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    for total, part in zip(totals, parts, strict=False):  # none where nothing came
        total += part


def _buffers(like: Sequence[Tensor], wanted: bool) -> list[Tensor]:
    return [torch.empty_like(x) for x in like if wanted]


_Transfers = Sequence[tuple[Sequence[Tensor], int]]  # tensors, and the rank that they go to or come from


def _start(axis: str, sends: _Transfers, receives: _Transfers) -> list[dist.Work]:
    """Start all transfers at once, in the same order on every rank: none waits for another."""
    group, size = current().group(axis), current().size(axis)
    posts = [(dist.isend, sent) for sent in sends] + [(dist.irecv, received) for received in receives]
    ops = [dist.P2POp(op, x, group=group, group_peer=to % size) for op, (tensors, to) in posts for x in tensors]
    return dist.batch_isend_irecv(ops) if ops else []


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
    works.clear()  # they hold what they sent
