"""Rotary embeddings by complex numbers, as Meta's Llama has them: the table a buffer, or a plain attribute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import VOCABULARY, Case, ids


def turns(tokens: int, width: int) -> Tensor:
    """exp(i·t·f) for each token and frequency, [tokens, width / 2]."""
    frequencies = torch.outer(torch.arange(tokens).float(), 1e4 ** -(torch.arange(0, width, 2).float() / width))
    return torch.polar(torch.ones_like(frequencies), frequencies)


def rotated(x: Tensor, table: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table.view(1, pairs.shape[1], 1, -1)).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, d: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (rotated(q, table), rotated(k, table), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(mixed.transpose(1, 2).flatten(2))


class MetaLlama(nn.Module):
    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        if buffer:
            self.register_buffer("table", turns(32, 4), persistent=False)
        else:
            self.table = turns(32, 4)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids)
        table = self.table.to(x.device)[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, table)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class TurnedBySize(MetaLlama):
    """The table is made in forward, of real numbers times complex ones; layers take a part of it."""

    def __init__(self) -> None:
        super().__init__(buffer=True)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids)
        angles = torch.arange(ids.shape[1], device=ids.device).float()[:, None] * self.scale
        table = torch.polar(torch.ones_like(angles), angles) * 2.0
        table = (table * self.scale)[None, :, None].expand(1, -1, 1, -1)[0, :, 0]
        for layer in self.layers:
            x = layer(x, table)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


_LM = {"ids": ids(), "labels": ids()}
CASES = (
    Case("complex rotary", lambda: MetaLlama(buffer=True), _LM, {"tp": 2}),
    Case("complex table", lambda: MetaLlama(buffer=False), _LM, {"tp": 2}),
    Case("complex in forward", TurnedBySize, _LM, {"tp": 2}),
)
