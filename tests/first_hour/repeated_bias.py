"""Biases and masks that are repeated for each sample: they are of a sample, and couple none."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import VOCABULARY, Case, ids

HEADS = 4


class RepeatedBias(nn.Module):
    """ALiBi as Bloom makes it, [h, 1, s] repeated over the batch, samples and heads in one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.blocks = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))

    def bias(self, ids: Tensor) -> Tensor:
        """[b·h, 1, s] or [b·h, s, s]."""
        slopes = torch.arange(HEADS, device=ids.device)[:, None, None]
        bias: Tensor = slopes * torch.arange(ids.shape[1], device=ids.device)
        return bias.to(self.emb.weight.dtype).repeat(ids.shape[0], 1, 1)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, (b, t), bias = self.emb(ids), ids.shape, self.bias(ids)
        for block in self.blocks:
            q, k, v = block(x).view(b, t, 3, HEADS, 4).permute(2, 0, 3, 1, 4).reshape(3, b * HEADS, t, 4)
            out = torch.baddbmm(bias, q, k.transpose(1, 2)).softmax(-1) @ v
            x = x + out.view(b, HEADS, t, 4).transpose(1, 2).reshape(b, t, 16)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class ExpandedBias(RepeatedBias):
    """Learned slopes, expanded over the batch and flattened, as MPT's variants do it; distances between tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.ones(HEADS))

    def bias(self, ids: Tensor) -> Tensor:
        b, t = ids.shape
        places = torch.arange(t, device=ids.device)
        far = (places[None, :] - places[:, None]).abs().to(self.slopes.dtype)
        bias = -self.slopes[:, None, None] * far
        return bias[None].expand(b, HEADS, t, t).reshape(b * HEADS, t, t)


class InterleavedMask(RepeatedBias):
    """A mask [b, s] with each sample's row once for each head, and a causal triangle tiled over both."""

    def bias(self, ids: Tensor) -> Tensor:
        b, t = ids.shape
        hidden = (ids == 0).repeat_interleave(HEADS, 0)[:, None, :]
        later = torch.ones(t, t, device=ids.device, dtype=torch.bool).triu(1).tile(b, HEADS, 1, 1)
        mask = hidden | later.reshape(b * HEADS, t, t)
        return torch.zeros_like(mask, dtype=self.emb.weight.dtype).masked_fill(mask, -30.0)


_LM = {"ids": ids(), "labels": ids()}
CASES = (
    Case("repeated bias", RepeatedBias, _LM),
    Case("expanded bias", ExpandedBias, _LM),
    Case("interleaved mask", InterleavedMask, _LM),
)
