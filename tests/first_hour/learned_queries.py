"""Layers that run before any input joins: learned queries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import VOCABULARY, Case, ids


class Queries(nn.Module):
    """Learned queries pass a list of layers before any input joins."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.emb, self.head = (
            nn.Parameter(torch.randn(1, 3, 16)),
            nn.Embedding(VOCABULARY, 16),
            nn.Linear(16, VOCABULARY),
        )
        self.first, self.blocks = (nn.ModuleList(nn.Linear(16, 16) for _ in range(2)) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        q = self.queries.expand(ids.shape[0], -1, -1)
        for block in self.first:
            q = q + block(q).relu()
        x = self.emb(ids) + q.mean(1, keepdim=True)
        for block in self.blocks:
            x = x + block(x).relu()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class SharedQueries(Queries):
    """The queries pass the layers before they are repeated for each sample: these layers read nothing of a batch."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        q = self.queries[0]
        for block in self.first:
            q = q + block(q).relu()
        q = torch.cat([q.expand(ids.shape[0], -1, -1), torch.zeros(ids.shape[0], 1, 16, device=ids.device)], 1)
        x = self.emb(ids) + q.mean(1, keepdim=True)
        for block in self.blocks:
            x = x + block(x).relu()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Decoder(nn.Module):
    """DETR's decoder: queries attend to each other, then to what the layers of an encoder have made of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.emb, self.head = nn.Embedding(4, 16), nn.Embedding(VOCABULARY, 16), nn.Linear(16, 5)
        self.selves = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.encoder = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.cross = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, ids: Tensor, label: Tensor) -> Tensor:
        q = self.queries.weight.unsqueeze(0).repeat(ids.shape[0], 1, 1)
        for block in self.selves:
            parts = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in block(q).chunk(3, -1))
            q = q + F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        x = self.emb(ids)
        for block in self.encoder:
            x = x + block(x).relu()
        for block in self.cross:
            q = q + (block(q) @ x.transpose(1, 2)).softmax(-1) @ x
        return F.cross_entropy(self.head(q).mean(1), label)


_LM = {"ids": ids(), "labels": ids()}
CASES = (
    Case("learned queries", Queries, _LM),
    Case("shared queries", SharedQueries, _LM),
    Case("query decoder", Decoder, {"ids": ids(), "label": torch.zeros(2, dtype=torch.long)}),
)
