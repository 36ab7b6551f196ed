"""Parameters without a dim, as a learned temperature: fully_shard takes none, so each rank keeps them whole."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import models
from tests.distributed.half import assert_half
from tests.distributed.programs import Subject, assert_parity, batches, local_batch, subject, trainer_of
from tests.harness import run_ranks

HALF: dict[str, dict[str, Any]] = {
    "one": {},
    "zero3": {"dp": 2, "micro_batch": 3, "zero": 3},
    "tp2": {"tp": 2},
    "pp2-zero2": {"pp": 2, "dp": 2, "micro_batch": 3, "zero": 2},
}
DOUBLE: dict[str, dict[str, Any]] = {
    "zero1-tp2": {"dp": 2, "tp": 2, "micro_batch": 3, "zero": 1},
    "zero3-recompute": {"dp": 2, "micro_batch": 3, "zero": 3, "recompute": (0, 1)},
}


class Gained(nn.Module):
    """A gain for each layer, and a temperature of the logits that is spread out before it is used."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(models.VOCABULARY, d), nn.Linear(d, models.VOCABULARY)
        self.layers = nn.ModuleList(_Layer(d) for _ in range(4))
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        scales = self.temperature.exp().expand(x.shape[-1])
        return F.cross_entropy(self.head(x * scales).flatten(0, 1), labels.flatten())


class _Layer(nn.Module):
    """The gain is too large: all its gradients have one sign, and no sum of them cancels."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(d, d), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.gain * x + self.linear(x).tanh()
        return y


@cache
def gained(dtype: torch.dtype) -> Subject:
    torch.manual_seed(0)
    model = Gained()
    program = models.layered(model, {name: x[:2] for name, x in batches()[0].items()}, dtype)
    return subject(model, dtype, program, batches())


@pytest.mark.parametrize("plan", HALF)
def test_bf16(plan: str) -> None:
    half = gained(torch.bfloat16)
    assert_half(half, half.plan(**HALF[plan]))


@pytest.mark.parametrize("plan", DOUBLE)
def test_fp64(plan: str) -> None:
    double = gained(torch.float64)
    assert_parity(double, double.plan(**DOUBLE[plan]))


def test_they_are_saved_and_resumed(tmp_path: Path) -> None:
    half = gained(torch.bfloat16)
    source = half.source(half.plan(**HALF["zero3"]))

    def on_rank(rank: int) -> bool:
        trainer = trainer_of(source, half.weights)
        trainer.step(local_batch(trainer, half.batches[0]))
        trainer.save(tmp_path)
        trained = trainer.state_dict()
        resumed = trainer_of(source, tmp_path).state_dict()
        moved = not torch.equal(trained["temperature"].cpu(), half.weights["temperature"].float())
        return moved and all(torch.equal(resumed[name], x) for name, x in trained.items())

    assert all(run_ranks(2, on_rank))
