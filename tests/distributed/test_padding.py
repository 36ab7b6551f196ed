"""Samples of 29 tokens padded to 32 by the trainer, against one process that trains on the samples as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.plan.plan import Plan
from autopar.search.layouts import ALL_GATHER, MEGATRON_SP, RING, ULYSSES
from tests import models
from tests.distributed.programs import (
    VOCABULARY,
    Batch,
    Subject,
    assert_parity,
    batches,
    gpt,
    parity,
    subject,
    trainer_of,
)
from tests.distributed.test_context import llama
from tests.harness import run_ranks

FP64 = torch.float64
TOKENS, SEQUENCE = 29, 32


class Layer(nn.Module):
    """Attention to all tokens that the mask has."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.norm_1, self.norm_2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (h.view(b, s, self.heads, d // self.heads).transpose(1, 2) for h in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, s, d)
        x = self.norm_1(x + self.out(attended))
        result: Tensor = self.norm_2(x + self.down(F.gelu(self.up(x))))
        return result


class Masked(nn.Module):
    """A bidirectional encoder; a second loss is of the mean of what the mask has, and a third of each such token."""

    def __init__(self, layers: int = 4, d: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, d), nn.Embedding(64, d)
        self.layers = nn.ModuleList(Layer(d, heads) for _ in range(layers))
        self.head, self.place = nn.Linear(d, VOCABULARY), nn.Linear(d, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.words(input_ids) + self.places(places)
        for layer in self.layers:
            x = layer(x, attention_mask.bool()[:, None, None, :])
        loss = F.cross_entropy(self.head(x).view(-1, VOCABULARY), labels.view(-1))
        here = attention_mask.to(x.dtype)
        pooled = (x * here.unsqueeze(-1)).sum(1) / here.sum(1, keepdim=True)
        missed = (self.place(x).squeeze(-1) - places / 8).square() * here
        total: Tensor = loss + pooled.square().mean() + missed.sum() / here.sum()
        return total


@cache
def data(masked: bool = False) -> tuple[Batch, ...]:
    """The last tokens of each sample are targets, so that a pad that counted would be seen."""
    made = batches(sequence=TOKENS)
    for batch in made:
        batch["labels"][4:, -4:] = batch["input_ids"][4:, -4:]
        if masked:
            batch["attention_mask"] = torch.ones_like(batch["labels"])
            batch["attention_mask"][::3, -9:] = 0
    return tuple(made)


@cache
def encoder() -> Subject:
    model = Masked()
    ids = torch.zeros(2, 16, dtype=torch.long)
    program = models.layered(model, {"input_ids": ids, "attention_mask": ids, "labels": ids})
    return subject(model, FP64, program)


SUBJECTS: dict[str, Callable[[], Subject]] = {"causal": llama, "masked": encoder, "learned": lambda: gpt(FP64)}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("causal", {}),
    "ring2": ("causal", {"cp": 2, "context": RING}),
    "ring4": ("causal", {"cp": 4, "context": RING}),
    "ulysses2": ("causal", {"cp": 2, "context": ULYSSES}),
    "all-gather2": ("learned", {"cp": 2, "context": ALL_GATHER}),
    "pp2-cp2": ("causal", {"pp": 2, "cp": 2}),
    "zero3-cp2": ("causal", {"cp": 2, "zero": 3}),
    "dp2-tp2-sp": ("learned", {"dp": 2, "tp": 2, "layout": MEGATRON_SP, "micro_batch": 3}),
    "masked": ("masked", {}),
    "masked-ring2": ("masked", {"cp": 2, "context": RING}),
    "masked-ulysses2-dp2": ("masked", {"cp": 2, "dp": 2, "context": ULYSSES, "micro_batch": 3}),
    "masked-pp2": ("masked", {"pp": 2}),
}
QUICK = {"ring4", "ulysses2", "pp2-cp2", "masked-ring2", "dp2-tp2-sp"}


def planned(name: str, **sizes: Any) -> tuple[Subject, Plan]:
    made = SUBJECTS[name]()
    return made, made.plan(sequence=SEQUENCE, padded_from=TOKENS, **sizes)


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in QUICK else [pytest.mark.slow]) for c in CASES])
def test_pads_change_nothing(case: str) -> None:
    name, sizes = CASES[case]
    assert_parity(*planned(name, **sizes), data(name == "masked"))


@pytest.mark.slow
def test_a_plan_with_pads_is_read_again(tmp_path: Path) -> None:
    made, plan = planned("causal", cp=2, tp=2)
    plan.save(tmp_path / "plan.yaml")
    read = Plan.load(tmp_path / "plan.yaml")
    assert read == plan and (read.batch.padded_from, read.batch.tokens, read.batch.sequence) == (
        TOKENS,
        TOKENS,
        SEQUENCE,
    )
    assert_parity(made, read, data())


def test_samples_of_another_length_are_refused() -> None:
    made, plan = planned("causal")
    source = made.source(plan)

    def train(rank: int) -> None:
        trainer = trainer_of(source, made.weights)
        for tokens in (TOKENS - 1, SEQUENCE):
            with pytest.raises(ValueError, match=r"planned for 12 samples \(.*\) of 29 tokens: plan again"):
                trainer.step(batches(1, sequence=tokens)[0])

    run_ranks(1, train)


def test_pads_that_counted_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same program, but its pads are targets."""
    made, plan = planned("causal")
    right = made.source(plan)
    wrong = right.replace('("labels", 1, -100)', '("labels", 1, 3)')
    assert wrong != right
    monkeypatch.setattr(Subject, "source", lambda self, plan: wrong)
    assert parity(made, plan, data()).loss > 1e-3
