"""Losses that compare the samples of a batch, on replicas that gather them: as one process has them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import parallelize
from autopar.verification.samples import inputs_of, random_batch
from autopar.verification.shrink import seeded
from tests.distributed.programs import Errors, subject, train_and_compare
from tests.first_hour.case import Tower, ids
from tests.first_hour.in_batch import Clip
from tests.harness import run_ranks

SAMPLES = 8


class SigLip(nn.Module):
    """Each pair a sigmoid of its own, the mask of the right ones made of the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.bias = Tower(), nn.Parameter(torch.tensor(-1.0))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        one, other = (F.normalize(self.tower(x).mean(1), dim=-1) for x in (left, right))
        signs = 2 * torch.eye(one.shape[0], dtype=one.dtype, device=one.device) - 1
        return -F.logsigmoid(signs * (one @ other.t() + self.bias)).sum(1).mean()


class Hardest(nn.Module):
    """The nearest other sample, which is only known among all."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        one, other = (self.tower(x).mean(1) for x in (left, right))
        nearest = (one @ other.t()).amax(1)
        return F.softplus(nearest - (one * other).sum(1)).mean()


class EachPair(SigLip):
    """The mean over all pairs: b² terms, of which replicas that count their own would have a part only."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        one, other = (F.normalize(self.tower(x).mean(1), dim=-1) for x in (left, right))
        right_pairs = torch.eye(one.shape[0], dtype=one.dtype, device=one.device)
        return F.binary_cross_entropy_with_logits(one @ other.t() + self.bias, right_pairs)


class SameClass(SigLip):
    """Supervised contrastive: pairs of samples of one class, counted among all."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        one, other = (F.normalize(self.tower(x).mean(1), dim=-1) for x in (left, right))
        kind = left[:, 0] % 2
        same = kind[:, None] == kind[None, :]
        return -((one @ other.t() + self.bias).log_softmax(1) * same).sum() / same.sum()


class Following(SigLip):
    """Each sample beside the next one: b - 1 of them."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        one, other = (F.normalize(self.tower(x).mean(1), dim=-1) for x in (left, right))
        return (one[1:] - other[:-1] * self.bias).pow(2).mean()


class Weighed(SigLip):
    """Targets that depend on all samples, their classes weighed: how often each occurs is known among all."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        scores = self.tower(right).mean(1)[:, :2] + self.bias
        targets = (left[:, 0] == left[:, 0].max()).long()
        weight = torch.arange(1, 3, dtype=scores.dtype, device=left.device) / 3
        return F.cross_entropy(scores, targets, weight=weight)


MODELS: dict[str, tuple[type[nn.Module], dict[str, Tensor]]] = {
    "clip": (Clip, {"input_ids": ids(), "pixel_values": torch.zeros(2, 3, 8, 8)}),
    "siglip": (SigLip, {"left": ids(), "right": ids()}),
    "hardest": (Hardest, {"left": ids(), "right": ids()}),
    "each pair": (EachPair, {"left": ids(), "right": ids()}),
    "same class": (SameClass, {"left": ids(), "right": ids()}),
    "following": (Following, {"left": ids(), "right": ids()}),
    "weighed": (Weighed, {"left": ids(), "right": ids()}),
}
PLANS: dict[str, dict[str, Any]] = {
    "dp2-tp2": {"dp": 2, "tp": 2, "sequence_parallel": False},
    "dp4-zero3": {"dp": 4, "zero": 3},
    "dp2-pp2": {"dp": 2, "pp": 2},
}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("name", "plan"), [(name, plan) for name in MODELS for plan in PLANS])
def test_trains_as_one_process(name: str, plan: str, tmp_path: Path) -> None:
    build, inputs = MODELS[name]
    model = seeded(build).double()
    result = parallelize(model, 4, gpu="cpu", inputs=inputs, global_batch=SAMPLES, precision="fp64", **PLANS[plan])
    assert result.plan.accumulation == 1 and 'axis="dp"' in result.source()
    batches = [random_batch(inputs_of(result.program), SAMPLES, result.job.batch.sequence, seed) for seed in range(2)]
    made = subject(model, torch.float64, result.program, batches)
    folder = replace(result, job=replace(result.job, model=made.model)).save(tmp_path / "program")
    source = (folder / "model.py").read_text()
    errors: list[Errors] = run_ranks(
        4, lambda rank: train_and_compare(source, folder, made.batches, made.reference, {})
    )
    assert all(error.worst <= 1e-9 for error in errors), errors
