"""Models that take sequences of one length: a table of positions is added whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, ids


class FixedTable(nn.Module):
    """Learned positions of the one length that the model takes."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pos, self.head = nn.Embedding(64, 16), nn.Parameter(torch.zeros(8, 16)), nn.Linear(16, 64)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids) + self.pos
        for block in self.blocks:
            x = x + block(x).relu()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class ClassToken(nn.Module):
    """As ViT does it: a token before the others, and a row of the table for each."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(64, 16), nn.Linear(16, 5)
        self.cls, self.pos = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(torch.zeros(1, 9, 16))
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, ids: Tensor, label: Tensor) -> Tensor:
        x = torch.cat([self.cls.expand(ids.shape[0], -1, -1), self.emb(ids)], 1) + self.pos
        for block in self.blocks:
            x = x + block(x + x.mean(1, keepdim=True)).relu()
        return F.cross_entropy(self.head(x[:, 0]), label)


class FixedBias(nn.Module):
    """A learned bias for every pair of tokens, added to the scores of each layer, and a causal mask of that size."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.bias, self.head = nn.Embedding(64, 16), nn.Parameter(torch.zeros(2, 8, 8)), nn.Linear(16, 64)
        self.blocks = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.register_buffer("mask", torch.ones(8, 8).tril() == 0, persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, (b, t) = self.emb(ids), ids.shape
        for block in self.blocks:
            q, k, v = (y.view(b, t, 2, 8).transpose(1, 2) for y in block(x).chunk(3, -1))
            scores = (q @ k.transpose(-2, -1) + self.bias).masked_fill(self.mask, float("-inf"))
            x = x + (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, 16)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class ListedPositions(nn.Module):
    """Positions are a list of Python's own numbers, as CpmAnt has them: a trace holds them for one length."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pos, self.head = nn.Embedding(64, 16), nn.Embedding(32, 16), nn.Linear(16, 64)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        backwards = torch.tensor(list(range(ids.size(1)))[::-1], device=ids.device)
        x = self.emb(ids) + self.pos(backwards)
        for block in self.blocks:
            x = x + block(x).relu()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


INPUTS = {"ids": ids(), "labels": ids()}
CLASS_INPUTS = {"ids": ids(), "label": torch.zeros(2, dtype=torch.long)}
CASES = (
    Case("fixed table", FixedTable, INPUTS),
    Case("class token", ClassToken, CLASS_INPUTS),
    Case("fixed bias", FixedBias, INPUTS),
    Case("listed positions", ListedPositions, INPUTS),
)
