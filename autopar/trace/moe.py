"""Hugging Face's mixtures of experts: each module of experts is one op, whatever its tokens choose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..ir.custom import EXPERTS

_NAME = "autopar"


@contextmanager
def one_op_experts(model: nn.Module) -> Iterator[None]:
    """Within: transformers' modules of experts call `autopar::experts`.

    Those that it cannot express (biases, another gate) run as their author wrote them.
    """
    if not _has_experts(model):
        yield
        return
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(_NAME, _experts)
    with _implementation(model, _NAME):
        yield


@contextmanager
def written_experts(model: nn.Module) -> Iterator[None]:
    """Within: experts run as their author wrote them; the kernel that transformers takes else has no float64."""
    if not _has_experts(model):
        yield
        return
    with _implementation(model, "eager"):
        yield


def _has_experts(model: nn.Module) -> bool:
    return any(hasattr(m, "_is_expert_parallel") for m in model.modules())  # set by transformers' decorator


@contextmanager
def _implementation(model: nn.Module, name: str) -> Iterator[None]:
    owner: Any = next(m for m in model.modules() if hasattr(m, "set_experts_implementation"))
    before = owner.get_experts_implementation()
    owner.set_experts_implementation(name)
    try:
        yield
    finally:
        owner.set_experts_implementation(before)


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Takes the place of the forward of a module of experts."""
    activation = _activation(self)
    if activation is None:
        written: Tensor = type(self).forward.__wrapped__(self, hidden_states, top_k_index, top_k_weights)
        return written
    gate, up = self.gate_up_proj.chunk(2, dim=1)
    result: Tensor = EXPERTS(hidden_states, top_k_index, top_k_weights, gate, up, self.down_proj, activation)
    return result


def _activation(module: Any) -> str | None:
    """The activation of a plain gated module of experts, None for any other."""
    from transformers.integrations.moe import _default_apply_gate  # no public name; what the author did not replace

    plain = module.has_gate and module.is_concatenated and type(module)._apply_gate is _default_apply_gate
    if not plain or module.has_bias or module.is_transposed or module.has_post_expert_norm:
        return None
    return _name(module.act_fn)


_NAMES = {"SiLU": "silu", "SiLUActivation": "silu", "ReLU": "relu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh"}


def _name(activation: Any) -> str | None:
    """The name among `ACTIVATIONS` of torch's or transformers' activation module, None for any other."""
    if isinstance(activation, nn.GELU):
        return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
    if not type(activation).__module__.startswith(("torch.", "transformers.")):
        return None
    return _NAMES.get(type(activation).__name__)
