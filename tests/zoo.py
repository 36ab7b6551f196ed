"""The model families that autopar promises: small for parity, and the 35 variants that must plan on meta.

A `Family` builds a small model and says what it is fed; `VARIANTS` are the variants of the field notes (sdpa and
eager attention, padding masks, auxiliary losses), at sizes that trace in a second or two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.own_models import VOCABULARY, ParallelGPT, UNet, nanogpt, nanogpt_eager

SEQUENCE = 16
Inputs = dict[str, Tensor]
Loss = Callable[[Any, Mapping[str, Tensor]], Tensor]


def image_loss(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross-entropy of a classifier that returns logits."""
    return F.cross_entropy(outputs, batch["labels"])


@dataclass(frozen=True)
class Family:
    """build: a small model with weights. inputs: a batch of `samples` from a generator. loss: where forward has none.

    convolutional: tensor parallelism is not promised to divide it.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Inputs]
    loss: Loss | None = None
    convolutional: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)  # plain keyword arguments of forward


# --------------------------------------------------------------------------------
# Batches


def token_batch(samples: int, generator: torch.Generator) -> Inputs:
    """ids and labels; some labels are padding, unequally by sample."""
    ids, labels = (torch.randint(VOCABULARY, (samples, SEQUENCE), generator=generator) for _ in range(2))
    padded = torch.arange(samples).unsqueeze(1) / samples * 0.8
    labels[torch.rand(samples, SEQUENCE, generator=generator) < padded] = -100
    return {"input_ids": ids, "labels": labels}


def masked_batch(samples: int, generator: torch.Generator) -> Inputs:
    """A token batch with an attention mask whose padding is on the right; no sample is all padding."""
    lengths = torch.randint(SEQUENCE // 2, SEQUENCE + 1, (samples, 1), generator=generator)
    return {**token_batch(samples, generator), "attention_mask": (torch.arange(SEQUENCE) < lengths).long()}


def image_batch(samples: int, generator: torch.Generator, size: int = 32) -> Inputs:
    return {
        "pixel_values": torch.randn(samples, 3, size, size, generator=generator),
        "labels": torch.randint(10, (samples,), generator=generator),
    }


def unet_batch(samples: int, generator: torch.Generator) -> Inputs:
    noisy, clean = (torch.randn(samples, 3, 16, 16, generator=generator) for _ in range(2))
    return {"pixel_values": noisy, "target": clean}


def vit_batch(samples: int, generator: torch.Generator) -> Inputs:
    """9 patches and the class token: 10 tokens, which sequence parallelism can halve."""
    return image_batch(samples, generator, 24)


def timm_batch(samples: int, generator: torch.Generator) -> Inputs:
    """timm calls its input `x`."""
    batch = image_batch(samples, generator)
    return {"x": batch["pixel_values"], "labels": batch["labels"]}


def speech_batch(samples: int, generator: torch.Generator) -> Inputs:
    return {
        "input_features": torch.randn(samples, 8, 32, generator=generator),
        "labels": token_batch(samples, generator)["labels"].clamp(min=0),
    }


# --------------------------------------------------------------------------------
# Hugging Face

_CAUSAL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "use_cache": False,
    "attention_dropout": 0.0,
}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2}


def huggingface(name: str, attention: str = "sdpa", **config: Any) -> Callable[[], nn.Module]:
    """A builder of transformers' model class `name`, whose config takes `config`."""

    def build() -> nn.Module:
        import transformers

        kind: Any = getattr(transformers, name)
        model: nn.Module = kind._from_config(kind.config_class(**config), attn_implementation=attention)
        return model

    return build


def _causal(name: str, attention: str = "sdpa", **config: Any) -> Callable[[], nn.Module]:
    return huggingface(name, attention, **{**_CAUSAL, **config})


def _gpt2(attention: str = "sdpa") -> Callable[[], nn.Module]:
    return huggingface(
        "GPT2LMHeadModel", attention, vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=4, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip


def _bert(attention: str = "sdpa") -> Callable[[], nn.Module]:
    return huggingface(
        "BertForMaskedLM", attention, vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=4,
        num_attention_heads=4, intermediate_size=72, max_position_embeddings=64, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def _t5(attention: str = "sdpa") -> Callable[[], nn.Module]:
    return huggingface(
        "T5ForConditionalGeneration", attention, vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=72, num_layers=3,
        num_decoder_layers=3, num_heads=4, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip


def _whisper(attention: str = "sdpa") -> Callable[[], nn.Module]:
    return huggingface(
        "WhisperForConditionalGeneration", attention, vocab_size=VOCABULARY, num_mel_bins=8, d_model=32,
        encoder_layers=3, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=72,
        decoder_ffn_dim=72, max_source_positions=16, max_target_positions=64, dropout=0.0, use_cache=False,
        decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip


def _vit(attention: str = "sdpa") -> Callable[[], nn.Module]:
    return huggingface(
        "ViTForImageClassification", attention, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=72, image_size=24, patch_size=8, num_labels=10, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip


def _gemma2(attention: str = "eager") -> Callable[[], nn.Module]:
    return _causal(
        "Gemma2ForCausalLM", attention, head_dim=8, sliding_window=8, query_pre_attn_scalar=8,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
    )  # fmt: skip


def _mixtral(attention: str = "sdpa", aux: bool = False) -> Callable[[], nn.Module]:
    return _causal(
        "MixtralForCausalLM", attention, num_local_experts=4, output_router_logits=aux, router_aux_loss_coef=0.02,
        sliding_window=None, **_MOE,
    )  # fmt: skip


def _qwen3_moe(attention: str = "sdpa") -> Callable[[], nn.Module]:
    return _causal(
        "Qwen3MoeForCausalLM", attention, head_dim=8, num_experts=4, moe_intermediate_size=24, norm_topk_prob=True,
        **_MOE,
    )  # fmt: skip


def _deepseek(attention: str = "sdpa") -> Callable[[], nn.Module]:
    return _causal(
        "DeepseekV3ForCausalLM", attention, num_key_value_heads=4, n_routed_experts=4, n_group=2, topk_group=1,
        moe_intermediate_size=24, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=4,
        qk_nope_head_dim=8, v_head_dim=8, **_MOE,
    )  # fmt: skip


def _gpt_oss(attention: str = "eager") -> Callable[[], nn.Module]:
    return _causal(
        "GptOssForCausalLM", attention, head_dim=8, num_local_experts=4, sliding_window=8, **_MOE,
    )  # fmt: skip


def _hf_resnet() -> nn.Module:
    return huggingface(
        "ResNetForImageClassification", "eager", embedding_size=8, hidden_sizes=[16, 16, 24, 24], depths=[2, 2, 2, 2],
        num_labels=10, layer_type="basic",
    )()  # fmt: skip


def _hf_convnext() -> nn.Module:
    return huggingface(
        "ConvNextForImageClassification", "eager", hidden_sizes=[8, 16, 24, 32], depths=[2, 2, 3, 2], num_labels=10,
        image_size=64, patch_size=4, drop_path_rate=0.0,
    )()  # fmt: skip


def timm_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    """A builder of timm's model `name`."""

    def build() -> nn.Module:
        import timm  # here: it takes a second

        model: nn.Module = timm.create_model(name, **options)
        return model

    return build


def _timm_vit() -> nn.Module:
    return timm_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=4, num_heads=4, num_classes=10
    )()


# --------------------------------------------------------------------------------
# The lists

_CACHE = {"use_cache": False}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("gpt2", _gpt2(), token_batch, arguments=_CACHE),
        Family("bert", _bert(), masked_batch),
        Family("t5", _t5(), masked_batch, arguments=_CACHE),
        Family("whisper", _whisper(), speech_batch, arguments=_CACHE),
        Family("vit", _vit(), vit_batch),
        Family("qwen3", _causal("Qwen3ForCausalLM", head_dim=8), token_batch, arguments=_CACHE),
        Family("gemma2", _gemma2(), token_batch, arguments=_CACHE),
        Family("parallel", ParallelGPT, token_batch),
        Family("mixtral", _mixtral(), token_batch, arguments=_CACHE),
        Family("unet", UNet, unet_batch, convolutional=True),
        Family("resnet", _hf_resnet, image_batch, convolutional=True),
        Family("convnext", _hf_convnext, lambda n, g: image_batch(n, g, 64), convolutional=True),
    )
}


def _variants() -> dict[str, Family]:
    both = ("sdpa", "eager")
    made = [Family("nanogpt:sdpa", nanogpt, token_batch), Family("nanogpt:eager", nanogpt_eager, token_batch)]
    causal: dict[str, Callable[[str], Callable[[], nn.Module]]] = {
        "gpt2": _gpt2,
        "llama": lambda how: _causal("LlamaForCausalLM", how),
        "qwen2": lambda how: _causal("Qwen2ForCausalLM", how),
        "qwen3": lambda how: _causal("Qwen3ForCausalLM", how, head_dim=8),
        "mixtral": _mixtral,
        "mixtral_aux": lambda how: _mixtral(how, aux=True),
        "qwen3_moe": _qwen3_moe,
        "deepseek_v3": _deepseek,
    }
    for name, build in causal.items():
        made += [Family(f"{name}:{how}", build(how), token_batch, arguments=_CACHE) for how in both]
    for how in both:
        made.append(Family(f"llama_padmask:{how}", causal["llama"](how), masked_batch, arguments=_CACHE))
        made.append(Family(f"bert:{how}", _bert(how), token_batch))
        made.append(Family(f"t5:{how}", _t5(how), token_batch, arguments=_CACHE))
        made.append(Family(f"vit:{how}", _vit(how), vit_batch))
        made.append(Family(f"whisper:{how}", _whisper(how), speech_batch, arguments=_CACHE))
    made += [
        Family("gemma2:eager", _gemma2(), token_batch, arguments=_CACHE),
        Family("gpt_oss:eager", _gpt_oss(), token_batch, arguments=_CACHE),
        Family("timm_vit", _timm_vit, timm_batch, image_loss),
        Family("timm_resnet50", timm_model("resnet50", num_classes=10), timm_batch, image_loss, convolutional=True),
        Family(
            "timm_convnext",
            timm_model("convnext_atto", num_classes=10),
            lambda n, g: {"x": image_batch(n, g, 64)["pixel_values"], "labels": image_batch(n, g)["labels"]},
            image_loss,
            convolutional=True,
        ),
        Family("hf_resnet:eager", _hf_resnet, image_batch, convolutional=True),
        Family("hf_convnext:eager", _hf_convnext, lambda n, g: image_batch(n, g, 64), convolutional=True),
    ]
    return {family.name: family for family in made}


VARIANTS = _variants()
