"""What the loss adds that is the same for all samples counts once, whatever the micro-batches and replicas."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.rules.data_axis import data_types
from tests.distributed.programs import VOCABULARY, ParallelBlock, Subject, assert_parity, subject


class Penalised(nn.Module):
    """Squares of the ends' parameters, large enough to be seen, and a number."""

    def __init__(self, d: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, d)
        self.blocks = nn.ModuleList(ParallelBlock(d, 2, 40) for _ in range(layers))
        self.head = nn.Linear(d, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return loss + 0.1 * sum(p.pow(2).sum() for p in self.head.parameters())


class WithConstant(Penalised):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(input_ids, labels) + 1.0


@cache
def made(constant: bool) -> Subject:
    torch.manual_seed(0)
    return subject(WithConstant() if constant else Penalised(), torch.float64)


PLANS: dict[str, dict[str, Any]] = {
    "dp2x3": {"dp": 2, "micro_batch": 2},
    "x3": {"micro_batch": 4},
    "pp2": {"pp": 2, "micro_batch": 3},
    "zero3x3": {"dp": 2, "micro_batch": 2, "zero": 3},
    "dp2-tp2x2": {"dp": 2, "tp": 2, "micro_batch": 3},
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("constant", [False, True])
def test_a_penalty_counts_once(constant: bool, plan: str) -> None:
    assert data_types(made(constant).program).coupling is None
    assert_parity(made(constant), made(constant).plan(**PLANS[plan]))
