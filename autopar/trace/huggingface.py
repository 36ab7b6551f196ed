"""What Hugging Face models need before they are traced; transformers is imported only for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .example_inputs import default_inputs as default_inputs
from .moe import one_op_experts

_NAME = "autopar"


def is_huggingface(model: nn.Module) -> bool:
    return any(cls.__name__ == "PreTrainedModel" for cls in type(model).__mro__)


def huggingface_of(model: nn.Module) -> nn.Module | None:
    """The transformers model that a module is, or that peft's adapters are put into; None for others."""
    if is_huggingface(model):
        return model
    inside = getattr(model, "get_base_model", None)  # peft's; it need not be installed
    base = inside() if callable(inside) else None
    return base if isinstance(base, nn.Module) and is_huggingface(base) else None


@contextmanager
def traceable(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Within: attention and experts are one op each, so that they can be traced and sharded as a whole."""
    with one_op_experts(model), _one_op_attention(model, inputs), without_cache(model):
        yield


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Within: the transformers models in a module return no keys and values for generation, whatever their configs."""
    found: list[Any] = [m.config for m in model.modules() if is_huggingface(m)]
    changed = [config for config in found if getattr(config, "use_cache", False)]
    for config in changed:
        config.use_cache = False
    try:
        yield
    finally:
        for config in changed:
            config.use_cache = True


@contextmanager
def _one_op_attention(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Within: attention is one scaled_dot_product_attention with grouped K/V heads; a plain causal mask no tensor.

    Anything but the plain causal mask (padding, sliding windows, position bias, soft caps) is left to the
    model's own implementation, so nothing is dropped.
    """
    inner: Any = huggingface_of(model)
    if inner is None or getattr(inner.config, "_attn_implementation", "") not in ("sdpa", _NAME):
        yield
        return
    from transformers import masking_utils

    parts: list[Any] = [m.config for m in inner.modules() if is_huggingface(m)]  # outer before inner
    before, find_packed = [c._attn_implementation for c in parts], masking_utils.find_packed_sequence_indices
    _register()
    inner.set_attn_implementation(_NAME)
    if "position_ids" not in inputs:
        # Positions that the model makes itself are 0…s−1, never packed; HF cannot see that while tracing
        # and would compare every pair of tokens.
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find_packed
        # Not by `set_attn_implementation`: it refuses "sdpa" for a model with a part that has it not.
        for config, implementation in zip(parts, before, strict=True):
            config._attn_implementation = implementation  # and those of its sub-configs, which follow in `parts`


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """q [b, heads, s, e], k and v [b, kv heads, s, e] → [b, s, heads, e]."""
    if any(other.get(name) is not None for name in ("position_bias", "softcap", "sliding_window")):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **other
        )
        return result
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=bool(causal and attention_mask is None),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


def _mask(*args: Any, mask_function: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
    """No tensor for the plain causal mask without padding, unless the model reads it too; HF's own mask otherwise."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    plain = mask_function is None or mask_function is causal_mask_function
    read = getattr(kwargs.get("config"), "index_topk", None) is not None  # sparse attention ranks what it allows
    if plain and attention_mask is None and not read:
        return None
    if read:
        kwargs["allow_is_causal_skip"] = False
    more: dict[str, Any] = {} if mask_function is None else {"mask_function": mask_function}
    make: Any = sdpa_mask
    return make(*args, attention_mask=attention_mask, **more, **kwargs)
