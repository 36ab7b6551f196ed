"""Batch norm over all samples of a step: statistics of every replica's part of the batch together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .mesh import current
from .parameters import owner_of


def statistics(module: nn.Module, path: str, channels: int, dtype: torch.dtype) -> None:
    """Declare the running statistics of the norm at `path`, as nn.BatchNorm has them: saved with the parameters."""
    owner, _ = owner_of(module, f"{path}.running_mean" if path else "running_mean")
    for name in ("running_mean", "running_var"):
        owner.register_buffer(name, torch.empty(channels, dtype=dtype, device="meta"))
    owner.register_buffer("num_batches_tracked", torch.empty((), dtype=torch.long, device="meta"))


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    axis: str = "dp",
) -> Tensor:
    """Normalise x [b, c, *] by mean and variance of each channel over the samples of all ranks of `axis`.

    Running statistics take the new values at `update_statistics`, so that a recomputed forward changes nothing.
    """
    y, mean, variance, count = _BatchNorm.apply(x, eps, axis)  # type: ignore[no-untyped-call]
    if running_mean is not None and running_var is not None:
        unbiased = variance * (count / (count - 1))
        for running, new in ((running_mean, mean), (running_var, unbiased)):
            running.following = torch.lerp(running, new.to(running.dtype), momentum)  # type: ignore[attr-defined]
    shape = (1, -1, *[1] * (x.dim() - 2))
    y = y if weight is None else y * weight.view(shape)
    result: Tensor = y if bias is None else y + bias.view(shape)
    return result.to(x.dtype)


class _BatchNorm(torch.autograd.Function):
    """x̂ = (x − mean) / √(variance + eps). All-reduces of two or one number a channel: 2 forward, 1 backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, axis: str) -> tuple[Tensor, Tensor, Tensor, float]:
        dims = [0, *range(2, x.dim())]
        wide = x if x.dtype == torch.float64 else x.float()
        count = x.numel() / x.shape[1] * current().size(axis)
        mean = _summed(wide.sum(dims, keepdim=True), axis) / count  # twice over x: no difference of large numbers
        centred = wide - mean
        variance = _summed(centred.square().sum(dims, keepdim=True), axis) / count
        inverse = (variance + eps).rsqrt()
        normal = centred * inverse
        ctx.save_for_backward(normal, inverse)
        ctx.axis, ctx.count, ctx.dtype, ctx.dims = axis, count, x.dtype, dims
        mean, variance = mean.flatten(), variance.flatten()
        ctx.mark_non_differentiable(mean, variance)
        return normal, mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        normal, inverse = ctx.saved_tensors
        grad = grads[0]
        sums = torch.stack([grad.sum(ctx.dims, keepdim=True), (grad * normal).sum(ctx.dims, keepdim=True)])
        mean, along = _summed(sums, ctx.axis) / ctx.count
        return ((grad - mean - normal * along) * inverse).to(ctx.dtype), None, None


def _summed(x: Tensor, axis: str) -> Tensor:
    if current().size(axis) > 1:
        dist.all_reduce(x, group=current().group(axis))
    return x
