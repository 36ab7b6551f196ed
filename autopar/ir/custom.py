"""Ops of our own in a traced graph: what is kept whole because no rule could shard its pieces.

An op is registered with torch, so that export records it and knows its shapes; the emitted program calls the
runtime's function of the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
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
    rows, weights, gate, up, down = leaves
    with torch.enable_grad():
        result = run_experts(rows, index, weights, gate, up, down, ACTIVATIONS[ctx.activation][1])
    gx, *gradients = torch.autograd.grad(result, leaves, gradient)
    return gx, None, *gradients, None


experts.register_autograd(_backward, setup_context=_save)

EXPERTS = torch.ops.autopar.experts.default


# --------------------------------------------------------------------------------
# The head of a language model with its loss

_library = torch.library.Library("autopar_losses", "DEF")
_library.define(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor target, Tensor? bias=None, *, int chunks, float scale=1.0, "
    "float? softcap=None, int ignore_index=-100) -> Tensor"
)


def _linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *, chunks: int, scale: float = 1.0,
    softcap: float | None = None, ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """What the runtime's function of this name computes, with all logits at once."""
    logits = scale * F.linear(x, weight, bias).to(torch.promote_types(x.dtype, torch.float32))
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, target, reduction="sum", ignore_index=ignore_index)


_library.impl("linear_cross_entropy", _linear_cross_entropy, "CompositeImplicitAutograd")

LINEAR_CROSS_ENTROPY = torch.ops.autopar_losses.linear_cross_entropy.default


# --------------------------------------------------------------------------------
# Opaque modules


@dataclass(frozen=True)
class OpaqueCall:
    """path: of the module, or of one that is the same. inputs: its args and kwargs, any tensor where one is given.

    reason: why it cannot be traced, with the user's lines. function: of a custom torch.autograd.Function, its class.
    """

    path: str
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    reason: str = ""
    function: Any = None


# The results of an opaque module, given what it is called with; known before it is traced.
Results = Callable[[list[Tensor]], list[Tensor]]
_results: ContextVar[Mapping[str, Results]] = ContextVar("results of the opaque modules of the trace that runs")


@contextmanager
def opaque_results(results: Mapping[str, Results]) -> Iterator[None]:
    """Within: a call of an opaque module gives what `results` has under its name."""
    token = _results.set(results)
    try:
        yield
    finally:
        _results.reset(token)


@torch.library.custom_op("autopar::opaque", mutates_args=())
def opaque(tensors: list[Tensor], name: str, given: int, samples: bool, flops: int) -> list[Tensor]:
    """A module that is kept whole: never run, only traced.

    tensors: what it is called with (`given` of them), then its parameters and buffers. name: among the program's
    opaque modules. samples: whether it treats each sample alone, as far as running it has shown. flops: of forward,
    for each row of the first tensor.
    """
    raise AssertionError("a graph node, not to be called")


@opaque.register_fake
def _(tensors: list[Tensor], name: str, given: int, samples: bool, flops: int) -> list[Tensor]:
    return _results.get()[name](tensors[:given])


OPAQUE = torch.ops.autopar.opaque.default
