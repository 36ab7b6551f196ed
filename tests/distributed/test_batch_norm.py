"""P13: batch norm by choice: statistics over all replicas, equal to one process with the whole batch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError, TraceError
from autopar.rules.spread import data_types
from tests.distributed.families import family
from tests.distributed.programs import Subject, assert_parity, local_batch, subject, trainer_of
from tests.harness import run_ranks
from tests.models import layered


class Block(nn.Module):
    def __init__(self, width: int, affine: bool = True) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width, affine=affine, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.norm(self.linear(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), target)


def _data() -> list[dict[str, Tensor]]:
    """Samples of another scale and place on each rank: statistics of a part are not those of the whole."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for _ in range(5):
        x = torch.randn(12, 8, generator=generator, dtype=torch.float64) * torch.arange(1, 13).unsqueeze(1)
        made.append(
            {"x": x + torch.arange(12).unsqueeze(1), "target": torch.randn(12, 1, generator=generator).double()}
        )
    return made


@cache
def _subject() -> Subject:
    data = _data()
    model = Model()
    program = layered(model.double(), {key: value[:2] for key, value in data[0].items()})
    return subject(model, torch.float64, program, data)


PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2, "micro_batch": 6},
    "dp4": {"dp": 4, "micro_batch": 3},
    "zero3": {"dp": 2, "micro_batch": 6, "zero": 3},
    "recompute": {"dp": 2, "micro_batch": 6, "recompute": "all"},
    "pp2": {"pp": 2, "micro_batch": 12, "schedule": "gpipe"},
    "dp2-tp2-pp2": {"dp": 2, "tp": 2, "pp": 2, "micro_batch": 6, "schedule": "gpipe"},
}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("plan", PLANS)
def test_parity(plan: str) -> None:
    """Losses, gradients, weights, running statistics and the number of batches."""
    made = _subject()
    assert "blocks.0.norm.num_batches_tracked" in made.reference.weights, "buffers are compared"
    assert_parity(made, made.plan(**PLANS[plan]))


@pytest.mark.parametrize("name", ["resnet"])
def test_families(name: str) -> None:
    made = family(name, torch.float64)
    assert_parity(made, made.plan(dp=2, micro_batch=6))


def test_p13_several_micro_batches_are_refused() -> None:
    """P13: their statistics would be those of a part of the batch."""
    coupling = data_types(_subject().program).coupling
    assert coupling is not None and coupling.replicas and coupling.short.startswith("batch norm couples samples at ")
    with pytest.raises(PlanError, match="use micro_batch=global_batch/dp"):
        _subject().source(_subject().plan(dp=2, micro_batch=3))


def test_the_default_is_to_refuse_and_to_name_the_choice() -> None:
    options: dict[str, Any] = {"gpu": "cpu", "inputs": {k: v[:2].float() for k, v in _data()[0].items()}}
    with pytest.raises(TraceError, match="batch_norm='synchronise'"):
        autopar.parallelize(Model(), 2, global_batch=12, **options)
    result = autopar.parallelize(Model(), 2, global_batch=12, batch_norm="synchronise", dp=2, **options)
    assert result.plan.accumulation == 1
    assert "batch norm couples samples" in str(result)
    with pytest.raises(PlanError, match="batch_norm='ignore'"):
        autopar.parallelize(Model(), 2, batch_norm="ignore", **options)


def test_statistics_are_saved_and_resumed(tmp_path: Path) -> None:
    made = _subject()
    source, weights = made.source(made.plan(dp=2, micro_batch=6, zero=3)), made.weights

    def on_rank(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        trainer = trainer_of(source, weights)
        for batch in made.batches[:2]:
            trainer.step(local_batch(trainer, batch))
        trainer.save(tmp_path / "saved")
        resumed = trainer_of(source, tmp_path / "saved")
        return trainer.state_dict(), resumed.state_dict()

    for saved, resumed in run_ranks(2, on_rank, timeout=120):
        assert saved["norm.num_batches_tracked"] == 2
        assert saved.keys() == resumed.keys()
        assert all(torch.equal(saved[name], resumed[name]) for name in saved)


class Twice(Model):
    """One norm, used twice: its statistics would be those of two places."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return super().forward(self.norm(x) * 2, target)


def test_statistics_that_two_uses_share_are_refused() -> None:
    with pytest.raises(TraceError, match="a batch norm is used twice in one forward"):
        layered(Twice().double(), {key: value[:2] for key, value in _data()[0].items()})


class Instances(Model):
    def __init__(self) -> None:
        super().__init__()
        self.images = nn.InstanceNorm1d(8, track_running_stats=True)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return super().forward(self.images(x.unsqueeze(-1).expand(-1, -1, 3)).sum(-1), target)


def test_instance_norms_with_running_statistics_are_refused() -> None:
    with pytest.raises(TraceError, match="track_running_stats=False"):
        layered(Instances().double(), {key: value[:2] for key, value in _data()[0].items()})
