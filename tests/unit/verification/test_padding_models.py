"""Pads in the models of transformers: the check runs them shrunk, on meta, and in a few seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from autopar.compile.compiler import prepare
from autopar.errors import PlanError
from autopar.ir.graph import Program
from autopar.request import Job, make_job
from autopar.runtime.data import padded
from autopar.verification.padding import check_padding
from examples.gpt import GPT, GPTConfig

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96,
}  # fmt: skip
TOKENS = ("input_ids", "labels")
MASKED = ("input_ids", "attention_mask", "labels")


def experts(**options: Any) -> nn.Module:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**SMALL, num_local_experts=4, **options))


def bert(kind: Any, **options: Any) -> nn.Module:
    return kind(hf.BertConfig(**SMALL, **options))  # type: ignore[no-any-return]


RIGHT: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], int, int]] = {
    "twelve layers of GPT-2": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config()), MASKED, 1001, 1008),
    "Llama 8B": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig()), TOKENS, 8190, 8192),
    "a window and a mask": (
        lambda: hf.MistralForCausalLM(hf.MistralConfig(**SMALL, sliding_window=6)), MASKED, 29, 32,
    ),
    "experts": (experts, TOKENS, 29, 32),
    "a balance loss of the mask's": (lambda: experts(output_router_logits=True), MASKED, 29, 32),
    "eager and causal": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, **EAGER)), TOKENS, 29, 32),
    "finite masks": (lambda: bert(hf.BertForMaskedLM, attn_implementation="eager"), MASKED, 29, 32),
}  # fmt: skip
EAGER: dict[str, Any] = {"attn_implementation": "eager"}
WRONG: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], int, int, str]] = {
    "both directions": (lambda: bert(hf.BertForMaskedLM), TOKENS, 29, 32, "scaled_dot_product_attention of BertLayer"),
    "samples padded on the left": (
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, **EAGER)), MASKED, 29, 32, "softmax of LlamaDecoderLayer",
    ),
    "a window of masked tokens": (
        lambda: hf.MistralForCausalLM(hf.MistralConfig(**SMALL, **EAGER, sliding_window=6)), MASKED, 29, 32,
        "softmax of MistralDecoderLayer",
    ),
    "a balance loss": (
        lambda: experts(output_router_logits=True), TOKENS, 29, 32, r"(sum|scatter_add|mean) of .*modeling_mixtral.py:",
    ),
    "positions beyond the table": (
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=2, n_embd=32, n_head=4)), TOKENS, 1020, 1030,
        r"embedding of prologue.wpe .*out of range",
    ),
    "positions that the mask counts": (
        lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**SMALL, max_position_embeddings=34)), MASKED, 30, 34, "out of",
    ),
}  # fmt: skip


def prepared(build: Callable[[], nn.Module], names: tuple[str, ...], tokens: int, sequence: int) -> tuple[Job, Program]:
    """A model on meta."""
    with torch.device("meta"):
        model = build()
    job = make_job(
        model, 2, gpu="h100-sxm-80gb", memory=None, loss=None, sequence=tokens, global_batch=4, optimizer=None,
        inputs={name: torch.zeros(2, 16, dtype=torch.long, device="meta") for name in names}, precision=None,
        batch_norm="refuse", pad_to_multiple_of=sequence,
    )  # fmt: skip
    return job, prepare(job.model, job.inputs, job.compute.precision, job.batch_norm)


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c == "Llama 8B")) for c in RIGHT])
def test_right_models_are_padded(case: str) -> None:
    build, names, tokens, sequence = RIGHT[case]
    check_padding(*prepared(build, names, tokens, sequence), tokens, sequence)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_models_are_refused_by_their_op(case: str) -> None:
    build, names, tokens, sequence, message = WRONG[case]
    with pytest.raises(PlanError, match=message):
        check_padding(*prepared(build, names, tokens, sequence), tokens, sequence)


def test_what_is_too_large_to_be_run_is_refused_with_the_memory_that_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.verification.padding.room_bytes", lambda: 2**30)
    large = prepared(lambda: GPT(GPTConfig(n_layer=4, n_head=32, d_model=4096)), TOKENS, 29, 32)
    with pytest.raises(PlanError, match=r"two layers of each class have 404 M parameters, .* 1.0 GiB that are free"):
        check_padding(*large, 29, 32)


def test_why_a_large_model_is_not_run_narrow_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_model(*_: object) -> nn.Module:
        raise ValueError("heads and width disagree")

    monkeypatch.setattr("autopar.verification.padding.narrow", no_model)
    monkeypatch.setattr("autopar.verification.padding.room_bytes", lambda: 2**20)
    with pytest.raises(PlanError, match=r"no narrow model can be made of its config: ValueError\('heads and width"):
        check_padding(*prepared(lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=2)), MASKED, 29, 32), 29, 32)


@pytest.mark.parametrize("masked", ["left", "beyond the window"])
def test_finite_masks_over_rows_that_see_no_key_do_change_gradients(masked: str) -> None:
    """Why both eager models above are refused: their pads count, though targets at masked tokens are ignored."""
    torch.manual_seed(0)
    model = hf.MistralForCausalLM(hf.MistralConfig(**SMALL, **EAGER, sliding_window=6 if masked != "left" else None))
    ids, mask = torch.randint(1, 96, (2, 29)), torch.ones(2, 29, dtype=torch.long)
    mask[0, slice(10) if masked == "left" else slice(5, 15)] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask.bool(), -100)}
    longer = padded(batch, (("input_ids", 1, 0), ("attention_mask", 1, 0), ("labels", 1, -100)), 32)
    plain, changed = (
        torch.autograd.grad(model(**samples).loss, model.lm_head.weight)[0] for samples in (batch, longer)
    )
    assert float((plain - changed).abs().max()) > 1e-4 * float(plain.abs().max())
