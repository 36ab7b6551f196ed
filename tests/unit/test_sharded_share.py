"""Tensor parallelism divides at least 95% of the FLOPs of each model at its published size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from autopar.compiler import prepare
from autopar.cost_models.describe import describe
from autopar.cost_models.hardware import gpu
from autopar.ir.graph import B, S
from autopar.rules import Axis
from autopar.search.intra_op import solve
from autopar.search.layouts import LAYOUTS, Layout
from autopar.search.op_costs import TimeCosts
from autopar.trace.huggingface import default_inputs, is_huggingface
from examples.gpt import GPT, GPTConfig
from examples.llama import llama_3_8b

VALUES = {B: 1, S: 2048}


def gpt_1_3b() -> nn.Module:
    """GPT-3 XL's sizes with GPT-2's vocabulary, which no power of two divides."""
    with torch.device("meta"):
        return GPT(GPTConfig(vocab_size=50257, n_layer=24, n_head=16, d_model=2048, block_size=2048))


def qwen2_7b() -> nn.Module:
    config = Qwen2Config(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        use_cache=False,
    )
    with torch.device("meta"):
        return Qwen2ForCausalLM(config)


def inputs_of(model: nn.Module) -> Mapping[str, Any]:
    if is_huggingface(model):
        return default_inputs(model, 2, 128)
    ids = torch.zeros(2, 128, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("build", [gpt_1_3b, llama_3_8b, qwen2_7b])
def test_tp_divides_the_work(build: Callable[[], nn.Module]) -> None:
    model = build()
    program = prepare(model, inputs_of(model), "bf16")
    for layout in LAYOUTS:
        assert sharded_fraction(program, layout) >= 0.95, layout.name


def sharded_fraction(program: Any, layout: Layout) -> float:
    axis = Axis("tp", 4, sequence=layout.sequence, values=VALUES)
    solution = solve(program, axis, TimeCosts(gpu("h100-sxm-80gb"), "bf16", 4, VALUES), layout)
    return describe(program, solution, VALUES).sharded_fraction
