"""Hugging Face models as users bring them: with inputs of their own, in adapters of peft's form."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import autopar
from autopar.compile.compiler import prepare
from autopar.request import make_job
from tests import zoo
from tests.interpreter import run_program

TOKENS = zoo.token_batch(3, torch.Generator().manual_seed(1))


def _llama(**config: Any) -> nn.Module:
    torch.manual_seed(0)
    small = {**zoo._CAUSAL, "num_hidden_layers": 2, "use_cache": True, **config}
    return zoo.huggingface("LlamaForCausalLM", **small)()


class Lora(nn.Module):
    """A linear that is kept, and a trained one of rank 2 beside it."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x))
        return result


class Adapted(nn.Module):
    """As peft wraps a model: forward takes anything, other attributes are the base model's."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_model: nn.Module = base.requires_grad_(False)
        for layer in base.model.layers:
            layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)

    def get_base_model(self) -> nn.Module:
        return self.base_model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


class Inside(nn.Module):
    """A user's own module around a transformers model, whose config keeps a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = _llama()

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Any]:
        outputs = self.llama(input_ids=input_ids)
        loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
        return loss, outputs.past_key_values


@pytest.mark.parametrize("build", [_llama, lambda: Adapted(_llama()), Inside])
def test_inputs_of_the_user(build: Any) -> None:
    """The cache is off while a model is traced, on again after it, and the loss and gradients are the model's."""
    warnings.simplefilter("ignore")
    model = build()
    program = prepare(model, TOKENS, "fp32")
    config = next(m.config for m in model.modules() if hasattr(m, "config"))
    assert config.use_cache
    own = copy.deepcopy(model)
    loss, expected = run_program(program, model, TOKENS), own(**TOKENS)[0]
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    loss.backward(), expected.backward()
    for (name, mine), theirs in zip(model.named_parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


class WithoutKernel(transformers.LlamaModel):
    _supports_sdpa = False


def test_parts_without_an_attention_kernel_keep_their_own() -> None:
    """transformers refuses to give "sdpa" back to a model with such a part."""
    model: Any = _llama()
    inner: Any = copy.deepcopy(model.config)
    inner._attn_implementation = "eager"
    model.model = WithoutKernel(inner)
    before = [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]
    assert {"sdpa", "eager"} <= set(before)
    program = prepare(model, dict(TOKENS), "fp32", "refuse")
    assert [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")] == before
    torch.testing.assert_close(run_program(program, model, TOKENS), model(**TOKENS)[0], rtol=1e-5, atol=1e-6)


def test_a_cache_asked_for_is_not_kept() -> None:
    inputs = {**TOKENS, "use_cache": True}
    options: Any = dict.fromkeys(("gpu", "memory", "loss", "sequence", "global_batch", "optimizer", "precision"), None)
    job = make_job(_llama(), autopar.Cluster(2, "cpu"), inputs=inputs, batch_norm="refuse", **options)
    assert job.inputs["use_cache"] is False and job.inputs["input_ids"] is TOKENS["input_ids"]


def test_adapters_need_no_inputs() -> None:
    """The base model's config says what they are."""
    warnings.simplefilter("ignore")
    with torch.device("meta"):
        model = Adapted(_llama())
    result = autopar.parallelize(model, gpus=2, gpu="cpu", sequence=16, global_batch=8, tp=2)
    assert set(result.program.inputs) == {"input_ids", "labels"}
    trained = {name for name, facts in result.program.parameters.items() if facts.requires_grad}
    assert len(trained) == 4 and all(".lora_" in name for name in trained)
    assert len(result.program.layer_calls) == 2


@pytest.mark.parametrize("name", ["Mixtral", "Qwen2Moe"])
def test_a_mixture_with_the_loss_of_its_router_is_saved(name: str, tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 16}
    config = getattr(transformers, f"{name}Config")(
        hidden_size=32, intermediate_size=64, shared_expert_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=99, num_experts_per_tok=2, output_router_logits=True,
        **sizes,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    result = autopar.parallelize(model, 2, gpu="cpu", sequence=16, global_batch=2, micro_batch=2, tp=2)
    result.save(tmp_path / "program")
    assert (tmp_path / "program" / "model.py").exists()
