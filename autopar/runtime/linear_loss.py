"""The head of a language model and its cross-entropy in one, a slice of the vocabulary at a time.

The logits [n, vocabulary] are the largest tensor of most models. Here no more than 1/chunks of them exist at once:
forward keeps one log-sum-exp a row, backward computes each slice again (one more matmul of the head's size).
Slices of the vocabulary, not of the rows: each slice of the weight gets its gradient from one matmul, as without
chunks, and ranks that share the vocabulary agree once, not once a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .bounds import notice_targets
from .mesh import current
from .parameters import chunk_range


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    chunks: int,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    size: int | None = None,
    axis: str = "tp",
) -> Tensor:
    """The sum of the losses of the rows, whose logits are scale · (x @ weight.T + bias), in fp32 (of fp64: in fp64).

    x: [n, d]; weight: [local vocabulary, d]; bias: [local vocabulary]; target: [n] global ids. softcap: the logits go
    through softcap · tanh(logits / softcap). size: the whole vocabulary, where each rank of `axis` has a chunk of it;
    the result, 0-dim, is then equal on all of them, and the gradient of x is this rank's summand.
    """
    start, group = 0, None
    if size is not None and current().size(axis) > 1:
        start, _ = chunk_range(size, current().size(axis), current().rank(axis))
        group = current().group(axis)
    notice_targets(target, len(weight) if size is None else size, ignore_index)
    head = _Head(chunks, start, scale, softcap)
    total: Tensor = _LinearCrossEntropy.apply(x, weight, bias, target, head, ignore_index, group)  # type: ignore[no-untyped-call]
    return total


class _Head:
    """The head: logits from rows, slice by slice. start: the id of the first token that this rank has."""

    def __init__(self, chunks: int, start: int, scale: float, softcap: float | None) -> None:
        self.chunks, self.start, self.scale, self.softcap = chunks, start, scale, softcap

    def slices(self, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        width = max(1, -(-len(weight) // self.chunks))
        for first in range(0, len(weight), width):
            part = slice(first, first + width)
            yield part, weight[part], None if bias is None else bias[part]

    def logits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The logits of a slice of the vocabulary: [n, slice], new, and in fp32 at least."""
        z = F.linear(x, weight, bias)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        if self.scale != 1.0:
            z.mul_(self.scale)
        return z if self.softcap is None else z.div_(self.softcap).tanh_().mul_(self.softcap)

    def slope(self, z: Tensor) -> Tensor | None:
        """The factor of the soft cap on the gradient of the logits `z`; None without one."""
        return None if self.softcap is None else z.div(self.softcap).square_().neg_().add_(1)

    def column(self, target: Tensor, part: slice, width: int) -> tuple[Tensor, Tensor]:
        """(the column of each row's target in a slice, 0 where it is not there; whether it is there)."""
        column = target - (self.start + part.start)
        here = (column >= 0) & (column < width)
        return column.masked_fill(~here, 0).unsqueeze(-1), here


class _LinearCrossEntropy(torch.autograd.Function):
    """Two small all-reduces forward (maximum; sum and target logit), none backward. Keeps no logits."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, head: _Head, ignore_index: int,
        group: dist.ProcessGroup | None,
    ) -> Tensor:  # fmt: skip
        exact = torch.promote_types(x.dtype, torch.float32)
        log_sum_exp = torch.full(target.shape, -torch.inf, dtype=exact, device=x.device)
        chosen = torch.zeros(target.shape, dtype=exact, device=x.device)
        for part, w, b in head.slices(weight, bias):
            z = head.logits(x, w, b)
            column, here = head.column(target, part, len(w))
            chosen += z.gather(-1, column).squeeze(-1).masked_fill_(~here, 0)
            log_sum_exp = torch.logaddexp(log_sum_exp, _log_sum_exp(z))
            del z  # before the next slice, not when its name is given to that
        if group is not None:
            log_sum_exp, chosen = _over_ranks(log_sum_exp, chosen, group)
        valid = target != ignore_index
        ctx.head = head
        ctx.save_for_backward(x, weight, bias, target, log_sum_exp, valid)
        return (log_sum_exp - chosen).masked_fill(~valid, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, target, log_sum_exp, valid = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        head: _Head = ctx.head
        # Of every slice a summand: in half precision many roundings would add up.
        grad_x = torch.zeros_like(x, dtype=log_sum_exp.dtype) if for_x else None
        grad_weight = torch.empty_like(weight) if for_weight else None
        grad_bias = torch.empty_like(bias) if for_bias else None
        of_row = (valid * gradient).unsqueeze(-1)
        for part, w, b in head.slices(weight, bias):
            z = head.logits(x, w, b)
            slope = head.slope(z)
            column, here = head.column(target, part, len(w))
            z.sub_(log_sum_exp.unsqueeze(-1)).exp_().scatter_add_(-1, column, -here.to(z.dtype).unsqueeze(-1))
            z.mul_(of_row if head.scale == 1.0 else of_row * head.scale)
            of_logits = (z if slope is None else z.mul_(slope)).to(x.dtype)
            del z, slope
            if grad_x is not None:
                grad_x += of_logits @ w
            if grad_weight is not None:
                torch.mm(of_logits.T, x, out=grad_weight[part])
            if grad_bias is not None:
                grad_bias[part] = of_logits.sum(0)
            del of_logits
        return None if grad_x is None else grad_x.to(x.dtype), grad_weight, grad_bias, None, None, None, None


def _log_sum_exp(z: Tensor) -> Tensor:
    """Over the last dim, using up `z`."""
    top = z.amax(-1).clamp_(min=torch.finfo(z.dtype).min)  # where all are -inf, so is the result
    return z.sub_(top.unsqueeze(-1)).exp_().sum(-1).log_().add_(top)


def _over_ranks(log_sum_exp: Tensor, chosen: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and chosen logits over the whole vocabulary, from those over the part of each rank of the group."""
    top = log_sum_exp.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    sums = torch.stack([(log_sum_exp - top).exp_(), chosen])
    dist.all_reduce(sums, group=group)
    return sums[0].log() + top, sums[1]
