"""Models without a list of layers: nothing to spread over stages."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import VOCABULARY, WITHOUT_PP, Case, ids


class ConvNet(nn.Module):
    """As PyTorch's MNIST example: convolutions and two linear layers, each an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.hidden, self.out = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        features = self.conv(x).relu().flatten(1)
        return F.cross_entropy(self.out(self.hidden(features).relu()), y)


class Tabular(nn.Module):
    """Regression on rows of features, with an embedded category."""

    def __init__(self) -> None:
        super().__init__()
        self.category, self.first = nn.Embedding(6, 4), nn.Linear(12, 32)
        self.norm, self.second, self.out = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, features: Tensor, category: Tensor, target: Tensor) -> Tensor:
        x = torch.cat([features, self.category(category)], 1)
        x = self.norm(self.first(x).relu())
        x = x + self.second(x).tanh()
        return F.mse_loss(self.out(x).squeeze(1), target)


class OneBlock(nn.Module):
    """A token model of one block that is no list: mixing along the sequence by a running mean."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(VOCABULARY, d), nn.Linear(d, VOCABULARY)
        self.gate, self.value = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(input_ids)
        x = x + self.gate(x).sigmoid() * self.value(x.mean(1, keepdim=True))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


_ROWS = torch.zeros(2)
CASES = (
    Case("conv net", ConvNet, {"x": torch.zeros(2, 1, 8, 8), "y": _ROWS.long()}, plans=WITHOUT_PP),
    Case(
        "tabular",
        Tabular,
        {"features": torch.zeros(2, 8), "category": _ROWS.long(), "target": _ROWS},
        plans=WITHOUT_PP,
    ),
    Case("one block", OneBlock, {"input_ids": ids(), "labels": ids()}, plans=WITHOUT_PP),
)
