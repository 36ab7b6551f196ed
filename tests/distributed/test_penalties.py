"""What the loss adds that is the same for all samples counts once, whatever the micro-batches and replicas."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import PlanError
from autopar.rules.spread import data_types
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


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("constant", [False, True])
def test_a_penalty_counts_once(constant: bool, plan: str) -> None:
    assert data_types(made(constant).program).coupling is None
    assert_parity(made(constant), made(constant).plan(**PLANS[plan]))


class AllPenalised(Penalised):
    """The usual weight penalty: every parameter, those of the layers too."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return loss + 0.01 * sum(p.pow(2).sum() for p in self.parameters())


@cache
def all_penalised() -> Subject:
    torch.manual_seed(0)
    return subject(AllPenalised(), torch.float64)


@pytest.mark.parametrize("plan", ["dp2x3", "zero2", "dp2-tp2x2"])
def test_a_penalty_over_the_parameters_of_layers(plan: str) -> None:
    options = {"dp": 2, "micro_batch": 2, "zero": 2} if plan == "zero2" else PLANS[plan]
    assert_parity(all_penalised(), all_penalised().plan(**options))


@pytest.mark.parametrize(("plan", "what"), [("zero3x3", "zero=3"), ("pp2", "pp=2")])
def test_they_must_be_there(plan: str, what: str) -> None:
    model = all_penalised()
    with pytest.raises(PlanError, match=rf"{what}: blocks\.0\..* is read outside its layer"):
        model.source(model.plan(**PLANS[plan]))
