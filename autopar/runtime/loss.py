"""Vocabulary-parallel embedding and cross-entropy: each rank has a chunk of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .bounds import notice_ids, notice_targets
from .mesh import current
from .parameters import chunk_range


def embedding(ids: Tensor, weight: Tensor, size: int, axis: str, padding_idx: int | None = None) -> Tensor:
    """Rows of a table sharded by rows: Partial over `axis`, zero for ids of other ranks; `bounds` notices others.

    ids: [*] global; weight: [local rows, d]; size: of the whole; padding_idx: a row without gradient. Returns [*, d].
    """
    if current().size(axis) == 1:
        return F.embedding(ids, weight, padding_idx)
    notice_ids(ids, size)
    start, stop = chunk_range(size, current().size(axis), current().rank(axis))
    if start == stop:  # more ranks than chunks: nothing to look up, but the gradient path stays
        return weight.new_zeros((*ids.shape, weight.shape[1])) + weight.sum()
    outside = (ids < start) | (ids >= stop)
    rows = (ids - start).masked_fill(outside, 0)
    padding = padding_idx - start if padding_idx is not None and start <= padding_idx < stop else None
    return F.embedding(rows, weight, padding).masked_fill(outside.unsqueeze(-1), 0)


def cross_entropy(logits: Tensor, target: Tensor, size: int, axis: str, ignore_index: int = -100) -> Tensor:
    """The sum of the losses, equal on every rank of `axis`.

    logits: [n, local vocabulary] in fp32 or fp64; target: [n] global ids; size: the whole vocabulary. Returns 0-dim.
    """
    if current().size(axis) == 1:
        return F.cross_entropy(logits, target, reduction="sum", ignore_index=ignore_index)
    notice_targets(target, size, ignore_index)
    return _CrossEntropy.apply(logits, target, size, axis, ignore_index)  # type: ignore[no-untyped-call, no-any-return]


class _CrossEntropy(torch.autograd.Function):
    """Three small all-reduces forward (maximum, sum, target logit), none backward.

    Saves the logits and one log-sum-exp a row, not the probabilities.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, size: int, axis: str, ignore_index: int) -> Tensor:
        group = current().group(axis)
        start, stop = chunk_range(size, current().size(axis), current().rank(axis))
        top = x.amax(-1) if stop > start else x.new_full(target.shape, -torch.inf)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        here = (target >= start) & (target < stop)
        column = (target - start).masked_fill(~here, 0)
        total = (x - top.unsqueeze(-1)).exp_().sum(-1)
        chosen = x.gather(-1, column.unsqueeze(-1)).squeeze(-1) if stop > start else torch.zeros_like(top)
        sums = torch.stack([total, chosen.masked_fill(~here, 0)])
        dist.all_reduce(sums, group=group)
        log_sum_exp = sums[0].log() + top
        valid = target != ignore_index
        ctx.save_for_backward(x, log_sum_exp, column, here & valid, valid)
        return (log_sum_exp - sums[1]).masked_fill(~valid, 0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, log_sum_exp, column, here, valid = ctx.saved_tensors
        grad = (logits - log_sum_exp.unsqueeze(-1)).exp_()
        if grad.shape[-1]:
            grad.scatter_add_(-1, column.unsqueeze(-1), -here.to(grad.dtype).unsqueeze(-1))
        return grad.mul_(grads[0]).masked_fill_(~valid.unsqueeze(-1), 0), None, None, None, None
