"""Frozen parts under no_grad before and after the trained one, and the trained one itself under it."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import VOCABULARY, Case, Tower, ids


class Distill(nn.Module):
    """A frozen teacher after the student."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Tower(2), Tower(4)
        self.teacher.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        own = self.student(ids)
        with torch.no_grad():
            target = self.teacher(ids)
        return F.mse_loss(own, target)


class Adapter(nn.Module):
    """A frozen encoder of images before a trained decoder, as CLIP before an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.out = nn.Conv2d(3, 16, 4, stride=4), nn.Linear(16, 5)
        self.encoder, self.adapter = (nn.ModuleList(nn.Linear(16, 16) for _ in range(n)) for n in (3, 2))
        for part in (self.patch, self.encoder):
            part.requires_grad_(False)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        x = self.patch(pixels).flatten(2).transpose(1, 2)
        for block in self.encoder:
            x = x + block(x).relu()
        return F.layer_norm(x, (16,))

    def forward(self, pixels: Tensor, label: Tensor) -> Tensor:
        x = self.encode(pixels)
        for block in self.adapter:
            x = x + block(x).relu()
        return F.cross_entropy(self.out(x.mean(1)), label)


class Reference(nn.Module):
    """DPO: log probabilities [b] of two answers, by the policy and by a frozen copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(Tower(), nn.Linear(16, VOCABULARY))
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        def gain(model: nn.Module) -> Tensor:
            return _answer(model(chosen), chosen) - _answer(model(rejected), rejected)

        own = gain(self.policy)
        with torch.no_grad():
            other = gain(self.reference)
        return -F.logsigmoid(0.1 * (own - other)).mean()


def _answer(logits: Tensor, ids: Tensor) -> Tensor:
    """The log probability of each sample's tokens."""
    return logits.log_softmax(-1).gather(2, ids.unsqueeze(2)).squeeze(2).sum(1)


class Stopped(nn.Module):
    """Two views, one of which stops the gradient (SimSiam): the same layers, with and without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.predict = Tower(2), nn.Linear(16, 16)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        own = self.predict(self.tower(left))
        with torch.no_grad():
            target = self.tower(right)
        return (own - target).square().mean()


_VIEWS = {"left": ids(), "right": ids()}
CASES = (
    Case("distill", Distill, {"ids": ids()}),
    Case("adapter", Adapter, {"pixels": torch.zeros(2, 3, 8, 8), "label": torch.zeros(2, dtype=torch.long)}),
    Case("frozen reference", Reference, {"chosen": ids(), "rejected": ids()}),
    Case("stopped view", Stopped, _VIEWS),
)
