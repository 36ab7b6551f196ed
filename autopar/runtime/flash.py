"""Attention over a block of keys, with the log-sum-exp of its scores: what merges blocks into one softmax.

torch's flash attention returns it from private ops only, named differently on CPU and CUDA: they are called here and
nowhere else. Given the output and log-sum-exp over all keys, their backward is exact for each block. None drops out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .tiles import Shape

_aten: Any = torch.ops.aten


def kernel(device: str, dtype: torch.dtype, width: int) -> Literal["cpu", "cuda", "math"]:
    """The kernel for heads up to `width` wide: flash attention where torch has it, else the block's scores are held."""
    if device == "cpu":
        return "cpu"
    return "cuda" if dtype in (torch.bfloat16, torch.float16) and width <= 256 else "math"


def block_forward(shape: Shape, scale: float, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q [b, h, n, e], k [b, g, m, e], v [b, g, m, f], g dividing h → out [b, h, n, f], log-sum-exp [b, h, n].

    The log-sum-exp is in fp32, or fp64 for fp64. "lower" and "upper" need n = m.
    """
    if shape == "upper":  # a lower triangle, read backwards
        out, lse = block_forward("lower", scale, q.flip(2), k.flip(2), v.flip(2))
        return out.flip(2), lse.flip(2)
    used, wide = _widened(q, k, v)
    if used == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*wide, 0.0, shape == "lower", scale=scale)
    elif used == "cuda":
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(*wide, 0.0, shape == "lower", scale=scale)
    else:
        out, lse = _math(shape == "lower", scale, *wide)
    return out[..., : v.shape[-1]], lse


def block_backward(
    shape: Shape, scale: float, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's summand of the gradients of q, k and v; `out` and `lse` are those over all keys."""
    if shape == "upper":
        dq, dk, dv = block_backward("lower", scale, *(x.flip(2) for x in (grad, q, out, lse, k, v)))
        return dq.flip(2), dk.flip(2), dv.flip(2)
    used, wide = _widened(q, k, v, grad, out)
    *qkv, grad, out = wide
    lse = lse.contiguous()  # the kernels read it as if it were
    if used == "cpu":
        op = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = op(grad, *qkv, out, lse, 0.0, shape == "lower", scale=scale)
    elif used == "cuda":
        op = _aten._scaled_dot_product_flash_attention_backward
        lengths = None, None, q.shape[2], k.shape[2]  # not packed
        state = (lse.new_empty(0),) * 2  # of the random numbers that dropout would need
        dq, dk, dv = op(grad, *qkv, out, lse, *lengths, 0.0, shape == "lower", *state, scale=scale)
    else:
        dq, dk, dv = _math_backward(shape == "lower", scale, grad, qkv, out, lse)
    return dq[..., : q.shape[-1]], dk[..., : q.shape[-1]], dv[..., : v.shape[-1]]


def _widened(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> tuple[str, list[Tensor]]:
    """Flash attention wants rows without gaps, and q, k and v as wide as each other, on CUDA by a multiple of 8: zeros
    beside them change no score."""
    width = max(q.shape[-1], v.shape[-1])
    used = kernel(q.device.type, q.dtype, width)
    width += -width % 8 if used == "cuda" else 0
    wide = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, k, v, *others))
    return used, [x if x.stride(-1) == 1 else x.contiguous() for x in wide]


def _math(causal: bool, scale: float, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    dtype, raised = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.unflatten(1, (k.shape[1], -1)).to(raised), k.to(raised), v.to(raised)
    scores = torch.einsum("bgrne,bgme->bgrnm", q, k) * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0, 0], dtype=torch.bool).triu(1), -torch.inf)
    out = torch.einsum("bgrnm,bgmf->bgrnf", scores.softmax(-1), v)
    return out.flatten(1, 2).to(dtype), scores.logsumexp(-1).flatten(1, 2)


def _math_backward(
    causal: bool, scale: float, grad: Tensor, qkv: Sequence[Tensor], out: Tensor, lse: Tensor
) -> tuple[Tensor, ...]:
    """Through the block's part in the merged output: out = Σ share · block_out, share = exp(block_lse − lse)."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    with torch.enable_grad():
        block_out, block_lse = _math(causal, scale, *leaves)
    share = (block_lse.detach() - lse).exp()[..., None]
    of_lse = (grad * (block_out.detach() - out) * share).sum(-1)
    return torch.autograd.grad([block_out, block_lse], leaves, [(grad * share).to(grad.dtype), of_lse.to(lse.dtype)])
