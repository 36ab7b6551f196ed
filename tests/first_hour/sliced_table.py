"""A table with a row for each position, cut to the sequence and read in several places."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import VOCABULARY, Case, ids


class SlicedTable(nn.Module):
    """Learned positions, added again before every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.out = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.pos = nn.Parameter(torch.randn(32, 16))
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = x + block(x + self.pos[: ids.shape[1]]).relu()
        return F.cross_entropy(self.out(x).flatten(0, 1), labels.flatten())


class Rotated(nn.Module):
    """A layer with rotary embeddings, whose tables it is given whole and cuts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        t = x.shape[1]
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        q, k = (y * cos[:t] + torch.cat([-y[..., 4:], y[..., :4]], -1) * sin[:t] for y in (q, k))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Rotary(nn.Module):
    """Tables of angles as buffers, read by every layer."""

    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        angles = torch.outer(torch.arange(32.0), 10000 ** -(torch.arange(8) % 4 / 4))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.blocks = nn.ModuleList(Rotated() for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Biased(nn.Module):
    """A layer with a table of its own beside the model's, both cut in both dims."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.own = nn.Linear(16, 48), nn.Parameter(torch.randn(2, 12, 12))

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        t = x.shape[1]
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) + self.own[:, :t, :t] + shared[:, :t, :t]
        return x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class RelativeTables(nn.Module):
    """A learned bias for each pair of tokens, of the model and of each layer; and one that features are read from."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.table, self.far = nn.Parameter(torch.randn(2, 12, 12)), nn.Linear(16, 12)
        self.blocks = nn.ModuleList(Biased() for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids)
        x = x + self.far(x)[..., : ids.shape[1]].softmax(-1) @ x
        for block in self.blocks:
            x = block(x, self.table)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


_LM = {"ids": ids(), "labels": ids()}
CASES = (
    Case("sliced table", SlicedTable, _LM),
    Case("rotary buffers", Rotary, _LM),
    Case("relative tables", RelativeTables, _LM),
)
