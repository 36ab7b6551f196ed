"""Ops of our own in a traced graph: what is kept whole because no rule could shard its pieces.

An op is registered with torch, so that export records it and knows its shapes; the emitted program calls the
runtime's function of the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..runtime.experts import experts as run_experts

# By the name that the op carries: how the emitted program writes it, and what it is.
ACTIVATIONS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "silu": ("F.silu", F.silu),
    "gelu": ("F.gelu", F.gelu),
    "gelu_tanh": ('lambda h: F.gelu(h, approximate="tanh")', lambda h: F.gelu(h, approximate="tanh")),
    "relu": ("F.relu", F.relu),
}


@torch.library.custom_op("autopar::experts", mutates_args=())
def experts(
    x: Tensor, index: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """`runtime.experts.experts` as one op."""
    return run_experts(x, index, weights, gate, up, down, ACTIVATIONS[activation][1])


@experts.register_fake
def _(x: Tensor, index: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: str) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, index, *others = ctx.saved_tensors
    leaves = [t.detach().requires_grad_() for t in (x, *others)]
    with torch.enable_grad():
        result = run_experts(leaves[0], index, *leaves[1:], ACTIVATIONS[ctx.activation][1])
    gx, *gradients = torch.autograd.grad(result, leaves, gradient)
    return gx, None, *gradients, None


experts.register_autograd(_backward, setup_context=_save)

EXPERTS = torch.ops.autopar.experts.default
