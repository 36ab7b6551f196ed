"""A tied head that an early loss reads too: one name on several stages, and another for the embedding."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.programs import VOCABULARY, Subject, assert_parity, subject


class Exit(nn.Module):
    """Four layers; the head, tied to the embedding, gives a loss after two of them and after all."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, d)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(d, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, losses = self.words(input_ids), []
        for i, layer in enumerate(self.layers):
            x = x + layer(x)
            if i in (1, 3):
                losses.append(F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))
        return 0.3 * losses[0] + losses[1]


@cache
def early_exit() -> Subject:
    return subject(Exit(), torch.float64)


@pytest.mark.parametrize("pp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_copies_of_a_tied_head_get_the_sum_of_their_gradients(pp: int) -> None:
    made = early_exit()
    plan = made.plan(pp=pp, schedule="gpipe", micro_batch=3)
    assert '("head.weight", "words.weight")' in made.source(plan)
    assert_parity(made, plan)
