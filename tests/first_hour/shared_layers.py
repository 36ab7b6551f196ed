"""Layers that read what is the model's: its parameters, between the uses of one layer, and its counts of targets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import VOCABULARY, WITHOUT_PP, Case, ids


class SharedGlue(nn.Module):
    """One layer used three times, each time scaled by another row of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.GELU())])
        self.gain = nn.Parameter(torch.ones(3, 16))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids)
        for i in range(3):
            x = x + self.blocks[0](x * self.gain[i])
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class LayerScale(nn.Module):
    """Two layers in turn, as ALBERT's groups, with a scale and a norm of the model after each."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head, self.norm = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY), nn.LayerNorm(16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(4, 16))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids)
        for i in range(4):
            x = self.norm(x + self.blocks[i % 2](x) * self.scale[i])
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Universal(nn.Module):
    """A universal transformer: one layer, a row of a learned table and of a constant one added before each use."""

    rate: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.steps, self.layer = nn.Embedding(3, 16), nn.ModuleList([nn.Linear(16, 16)])
        self.register_buffer("rate", torch.linspace(0.5, 1.0, 3))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids)
        for i in range(3):
            h = x + self.steps.weight[i]
            x = x + self.rate[i] * self.layer[0](h).relu() * torch.sigmoid(self.steps.weight.mean(0))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Judged(nn.Module):
    """A layer that gives a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.inner(x).relu()
        return x, F.cross_entropy(x.flatten(0, 1), labels.flatten())


class DeepLosses(nn.Module):
    """Deep supervision: each layer's mean loss is over the targets of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.blocks = nn.Embedding(16, 16), nn.ModuleList(Judged() for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, losses = self.emb(ids), []
        for block in self.blocks:
            x, loss = block(x, labels)
            losses.append(loss)
        return torch.stack(losses).sum()


_LM = {"ids": ids(), "labels": ids()}
CASES = (
    Case("shared glue", SharedGlue, _LM, plans=WITHOUT_PP),
    Case("layer scale", LayerScale, _LM),
    Case("losses of layers", DeepLosses, _LM),
    Case("universal", Universal, _LM, plans=WITHOUT_PP),
)
