"""Forwards that draw random numbers: verified with the same draws on both sides; one for a whole batch is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import parallelize
from autopar.api import Parallelized
from autopar.errors import PlanError
from autopar.verification.ranks import Task, run_task
from autopar.verification.samples import inputs_of, random_batch
from tests.first_hour.case import VOCABULARY, Tower, ids

LM = {"ids": ids(), "labels": ids()}


class Autoencoder(nn.Module):
    """A variational one: noise in the middle, and in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.mean, self.scale = Tower(), nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tower.emb(ids)
        for block in self.tower.blocks:
            x = x + block(x + 0.1 * torch.randn_like(x))
        mean: Tensor = self.mean(x)
        scale = self.scale(x)
        state = mean + torch.exp(0.5 * scale) * torch.randn_like(mean)
        loss: Tensor = F.cross_entropy(self.head(state).flatten(0, 1), labels.flatten())
        return loss + 0.01 * (mean**2).mean()


class DropPath(Autoencoder):
    """Whole branches are dropped, sample by sample; flags by their chance; noise written into a new tensor."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tower.emb(ids)
        for block in self.tower.blocks:
            kept = torch.rand(x.shape[0], 1, 1, device=x.device) < 0.8
            x = x + block(x) * kept
        x = x * torch.bernoulli(torch.sigmoid(x.detach()))
        x = x + torch.empty_like(x).normal_(0.0, 0.1)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Sampled(Autoencoder):
    """torch's distributions."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tower(ids)
        given = torch.distributions.Normal(self.mean(x), F.softplus(self.scale(x)))
        prior = torch.distributions.Normal(0, 1)
        loss = F.cross_entropy(self.head(given.rsample()).flatten(0, 1), labels.flatten())
        return loss + 0.1 * torch.distributions.kl_divergence(given, prior).mean()


class OneDraw(Autoencoder):
    """One number for the whole batch: parts of it would draw others."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tower(ids) * torch.rand(16, device=ids.device)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def planned(kind: Callable[[], nn.Module], **pins: Any) -> Parallelized:
    torch.manual_seed(0)
    result: Parallelized = parallelize(kind(), 2, gpu="cpu", inputs=LM, global_batch=8, **pins)
    return result


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("pins", [{"dp": 2, "micro_batch": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("kind", [Autoencoder, DropPath, Sampled])
def test_both_sides_draw_the_same(kind: Callable[[], nn.Module], pins: dict[str, Any]) -> None:
    parity = planned(kind, **pins).verify(steps=2)
    assert parity.holds, parity
    assert "the same random numbers" in str(parity)


def test_a_draw_for_the_whole_batch_is_not_made_by_its_parts() -> None:
    with pytest.raises(PlanError, match="draws random numbers for the batch as a whole"):
        planned(OneDraw, dp=2)


def test_the_rank_that_failed_first_is_shown(tmp_path: Path) -> None:
    """The other one waits for it, and loses its connection."""
    result = planned(Autoencoder, tp=2)
    line = "        cause = 1 / (dist.get_rank() - 1)\n"
    source = "import torch.distributed as dist\n" + result.source()
    at = source.index("\n", source.index("def forward(self")) + 1
    (tmp_path / "model.py").write_text(source[:at] + line + source[at:])
    batch = random_batch(inputs_of(result.program), 8, 8, 0)
    with pytest.raises(PlanError, match=r"(?s)rank 1 failed first.*ZeroDivisionError") as failed:
        run_task(Task([batch], result.weights.values, None), tmp_path)
    assert "Connection" not in str(failed.value)
