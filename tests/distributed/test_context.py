"""Context parallelism: sequences cut over cp, by each layout, against one process.

All models know positions of the whole sequence (S12), and nearly all valid targets are in its second half (S13).
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.plan.plan import Plan
from autopar.search.layouts import ALL_GATHER, MEGATRON_SP, RING, ULYSSES, Layout
from tests import models
from tests.distributed.programs import (
    GLOBAL_BATCH,
    SEQUENCE,
    VOCABULARY,
    Batch,
    Subject,
    assert_parity,
    batches,
    gpt,
    subject,
)

FP64 = torch.float64
LAYOUTS = {layout.name: layout for layout in (RING, ULYSSES, ALL_GATHER)}


class Layer(nn.Module):
    """Post-norm attention to all positions."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.norm_1, self.norm_2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (h.view(b, s, self.heads, d // self.heads).transpose(1, 2) for h in self.qkv(x).chunk(3, -1))
        x = self.norm_1(x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, d)))
        result: Tensor = self.norm_2(x + self.down(F.gelu(self.up(x))))
        return result


class Encoder(nn.Module):
    """Learned positions, and a second loss that wants each token's own position."""

    def __init__(self, layers: int = 4, d: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, d), nn.Embedding(64, d)
        self.layers = nn.ModuleList(Layer(d, heads) for _ in range(layers))
        self.head, self.place = nn.Linear(d, VOCABULARY), nn.Linear(d, 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        b, s = input_ids.shape
        places = torch.arange(s, device=input_ids.device)
        x = self.words(input_ids) + self.places(places)
        for layer in self.layers:
            x = layer(x)
        loss = F.cross_entropy(self.head(x).view(-1, VOCABULARY), labels.view(-1))
        wanted = (places.to(x.dtype) / 8).expand(b, s)
        return loss + F.mse_loss(self.place(x).squeeze(-1), wanted)


@cache
def encoder() -> Subject:
    return subject(Encoder(), FP64)


@cache
def llama() -> Subject:
    """8 query and 2 K/V heads."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 4}
    model, program = models.llama(FP64, **sizes, num_attention_heads=8, num_key_value_heads=2)
    return subject(model, FP64, program)


@cache
def data() -> tuple[Batch, ...]:
    """Nearly all padding is in the first half of the sequence."""
    made = batches()
    for batch in made:
        batch["labels"][:, : SEQUENCE // 2 - 1] = -100
    return tuple(made)


SUBJECTS = {"causal": llama, "bidirectional": encoder, "learned": gpt}
WITH: dict[str, dict[str, Any]] = {
    "alone": {},
    "tp2": {"tp": 2},
    "tp2-sp": {"tp": 2, "layout": MEGATRON_SP},
    "tp4": {"tp": 4},  # more ranks than K/V heads
    "pp2": {"pp": 2},
    "zero3": {"zero": 3},
    "recompute": {"recompute": "all"},
}
QUICK = {  # each layout, each subject, each size and each companion
    ("ring", "causal", 2, "tp2-sp"), ("ring", "bidirectional", 4, "alone"), ("ring", "learned", 2, "pp2"),
    ("ulysses", "causal", 4, "alone"), ("ulysses", "bidirectional", 2, "zero3"), ("ulysses", "causal", 2, "tp2"),
    ("all_gather", "causal", 4, "recompute"), ("ring", "causal", 2, "tp4"), ("all_gather", "bidirectional", 2, "tp2"),
}  # fmt: skip


def cases() -> list[Any]:
    every = [c for c in product(LAYOUTS, ("causal", "bidirectional"), (2, 4), WITH) if c[2:] != (4, "tp4")]
    every += [case for case in QUICK if case not in every]
    return [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in every]


def planned(name: str, context: Layout, **sizes: Any) -> tuple[Subject, Plan]:
    made = gpt(FP64) if name == "learned" else SUBJECTS[name]()
    return made, made.plan(context=context, **sizes)


@pytest.mark.parametrize(("layout", "name", "cp", "companion"), cases())
def test_s12_s13_a_cut_sequence_trains_as_a_whole_one(layout: str, name: str, cp: int, companion: str) -> None:
    made, plan = planned(name, LAYOUTS[layout], cp=cp, **WITH[companion])
    assert_parity(made, plan, data())


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [{"pp": 2, "dp": 2, "cp": 2}, {"dp": 2, "cp": 2, "tp": 2}], ids=str)
def test_on_eight_processes(sizes: dict[str, int], layout: str) -> None:
    made, plan = planned("causal", LAYOUTS[layout], micro_batch=GLOBAL_BATCH // 4, **sizes)
    assert_parity(made, plan, data())
