"""Sliding windows under context parallelism: no mask held, against one process with Hugging Face's masks."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from autopar.search.layouts import ALL_GATHER, MEGATRON_SP, RING, ULYSSES
from autopar.trace.example_inputs import default_inputs
from tests import models
from tests.distributed.programs import VOCABULARY, Batch, Subject, assert_parity, batches, subject

FP64 = torch.float64
SEQUENCE = 32
LAYOUTS = {layout.name: layout for layout in (RING, ULYSSES, ALL_GATHER)}
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@cache
def mistral(window: int) -> Subject:
    """Each layer in a window; 4 query and 2 K/V heads."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**_SIZES, sliding_window=window)
    model = models.seeded(lambda: MistralForCausalLM(config), False)
    return subject(model, FP64, models.layered(model, default_inputs(model, 2, 16), FP64))


@cache
def qwen(window: int) -> Subject:
    """Every second layer in a window, the others see all that is before."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    kinds = ["full_attention", "sliding_attention"] * 2
    config = Qwen3Config(
        **_SIZES, head_dim=8, use_sliding_window=True, sliding_window=window, max_window_layers=0, layer_types=kinds
    )
    model = models.seeded(lambda: Qwen3ForCausalLM(config), False)
    return subject(model, FP64, models.layered(model, default_inputs(model, 2, 16), FP64))


@cache
def data() -> tuple[Batch, ...]:
    made = batches(sequence=SEQUENCE)
    for batch in made:
        batch["labels"][:, : SEQUENCE // 2 - 1] = -100
    return tuple(made)


SUBJECTS = {
    "short": lambda: mistral(5),  # in order, and a ring ends early
    "long": lambda: mistral(20),  # zigzag
    "mixed": lambda: qwen(5),  # zigzag, as the full layers want it
    "whole": lambda: mistral(SEQUENCE),  # plain causal
}
WITH: dict[str, dict[str, Any]] = {
    "alone": {},
    "tp2": {"tp": 2},
    "tp2-sp": {"tp": 2, "layout": MEGATRON_SP},
    "pp2": {"pp": 2},
    "zero3": {"zero": 3},
    "recompute": {"recompute": "all"},
}
QUICK = {
    ("ring", "short", 4, "alone"), ("ring", "mixed", 2, "tp2"), ("all_gather", "short", 2, "recompute"),
    ("ulysses", "mixed", 2, "pp2"), ("ring", "long", 2, "pp2"),
}  # fmt: skip


def cases() -> list[Any]:
    every = product(LAYOUTS, SUBJECTS, (2, 4), WITH)
    return [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in every]


@pytest.mark.parametrize(("layout", "name", "cp", "companion"), cases())
def test_windows_over_a_cut_sequence_train_as_over_a_whole_one(layout: str, name: str, cp: int, companion: str) -> None:
    made = SUBJECTS[name]()
    plan = made.plan(context=LAYOUTS[layout], cp=cp, sequence=SEQUENCE, **WITH[companion])
    source = made.source(plan)
    by_heads = layout == "ulysses" and _SIZES["num_attention_heads"] % (cp * plan.mesh.tp) == 0  # else by a ring
    assert ("mask" in source) == by_heads, "a window stands for it"
    assert_parity(made, plan, data())
