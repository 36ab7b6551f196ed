"""Tensor parallelism divides at least 95% of the FLOPs of each model at its published size.

Deep lists of layers are traced in the time of three; those that do not fold (T5's and Whisper's layers return several
values, Gemma2's alternate) are slow, and so are copies of them with fewer layers, in which the embedding and the
head, which tp divides least evenly, weigh more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from autopar.compile.compiler import prepare
from autopar.cost_models.describe import describe
from autopar.cost_models.hardware import gpu
from autopar.errors import InfeasibleError
from autopar.ir.graph import B, S
from autopar.rules import TensorAxis
from autopar.search.intra_op import solve
from autopar.search.layouts import LAYOUTS, MEGATRON_SP, Layout
from autopar.search.op_costs import TimeCosts
from autopar.trace.huggingface import default_inputs, is_huggingface
from examples.gpt import GPT, GPTConfig
from examples.llama import llama_3_8b
from tests.own_models import ParallelGPT
from tests.zoo import huggingface

VALUES = {B: 1, S: 2048}


def gpt_1_3b() -> nn.Module:
    """GPT-3 XL's sizes with GPT-2's vocabulary, which no power of two divides."""
    with torch.device("meta"):
        return GPT(GPTConfig(vocab_size=50257, n_layer=24, n_head=16, d_model=2048, block_size=2048))


def published(name: str, attention: str = "sdpa", **config: Any) -> Callable[[], nn.Module]:
    """A builder of transformers' model class `name` on meta, at a published configuration."""

    def build() -> nn.Module:
        with torch.device("meta"):
            return huggingface(name, attention, **config)()

    return build


def parallel_6b() -> nn.Module:
    """GPT-J's sizes."""
    with torch.device("meta"):
        return ParallelGPT(layers=28, d=4096, heads=16, width=16_384)


def t5(layers: int) -> Callable[[], nn.Module]:
    return published(
        "T5ForConditionalGeneration", d_model=1024, d_ff=4096, num_layers=layers, num_heads=16, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip


def whisper(layers: int) -> Callable[[], nn.Module]:
    return published(
        "WhisperForConditionalGeneration", num_mel_bins=128, d_model=1280, encoder_layers=layers,
        decoder_layers=layers, encoder_attention_heads=20, decoder_attention_heads=20, encoder_ffn_dim=5120,
        decoder_ffn_dim=5120, vocab_size=51_866, use_cache=False,
    )  # fmt: skip


def gemma2(layers: int) -> Callable[[], nn.Module]:
    return published(
        "Gemma2ForCausalLM", "eager", vocab_size=256_000, hidden_size=3584, intermediate_size=14_336,
        num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=8, head_dim=256, use_cache=False,
    )  # fmt: skip


# At the sizes of: gpt2-medium, bert-large, t5-large, whisper-large-v3, vit-large, Qwen2-7B, Qwen3-8B, Gemma-2-9B,
# Mixtral-8x7B.
PUBLISHED: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt_1_3b,
    "llama": llama_3_8b,
    "qwen2": published(
        "Qwen2ForCausalLM", vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, use_cache=False,
    ),
    "gpt2": published("GPT2LMHeadModel", n_embd=1024, n_layer=24, n_head=16, use_cache=False),
    "bert": published(
        "BertForMaskedLM", hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
    "t5": t5(24),
    "whisper": whisper(32),
    "vit": published(
        "ViTForImageClassification", hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
        intermediate_size=4096, num_labels=1000,
    ),
    "qwen3": published(
        "Qwen3ForCausalLM", vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, use_cache=False,
    ),
    "gemma2": gemma2(42),
    "parallel": parallel_6b,
    "mixtral": published(
        "MixtralForCausalLM", vocab_size=32_000, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, use_cache=False,
    ),
}  # fmt: skip


def inputs_of(model: nn.Module) -> Mapping[str, Any]:
    if is_huggingface(model):
        return default_inputs(model, 2, 128)
    ids = torch.zeros(2, 128, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


DEEP = {"t5": t5(2), "whisper": whisper(2), "gemma2": gemma2(2)}


QUICK = ("llama", "bert")


@pytest.mark.parametrize("family", [pytest.param(f, marks=[] if f in QUICK else [pytest.mark.slow]) for f in PUBLISHED])
def test_tp_divides_the_work(family: str) -> None:
    _check(PUBLISHED[family]())


@pytest.mark.slow
@pytest.mark.parametrize("family", DEEP)
def test_tp_divides_the_work_of_a_shallow_copy(family: str) -> None:
    _check(DEEP[family]())


def _check(model: nn.Module) -> None:
    program = prepare(model, inputs_of(model), "bf16")
    tokens = any(S in tensor.shape for tensor in program.inputs.values())
    for layout in LAYOUTS:
        if layout is MEGATRON_SP and not tokens:  # 197 tokens of an image: no tp divides them
            with pytest.raises(InfeasibleError, match="197"):
                sharded_fraction(program, layout)
            continue
        assert sharded_fraction(program, layout) >= 0.95, layout.name


def sharded_fraction(program: Any, layout: Layout) -> float:
    # As many tokens for images, else replicating is faster than communicating.
    values = VALUES if any(S in tensor.shape for tensor in program.inputs.values()) else {B: 64, S: 1}
    axis = TensorAxis(4, values, layout.sequence)
    solution = solve(program, axis, TimeCosts(gpu("h100-sxm-80gb"), "bf16", 4, values), layout)
    return describe(program, solution, values).sharded_fraction
