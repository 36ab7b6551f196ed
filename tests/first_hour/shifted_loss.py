"""A number added to a mean over the batch: each part of a batch has a share of it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, Tower, ids


class Cosine(nn.Module):
    """1 − the mean cosine of two sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return 1 - F.cosine_similarity(self.tower(left), self.tower.emb(right), dim=-1).mean()


class TwoCosines(Cosine):
    """Of two means, scaled, with a number inside and one outside."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        x, y = self.tower(left), self.tower.emb(right)
        tokens = F.cosine_similarity(x, y, dim=-1).mean()
        pooled = F.cosine_similarity(x.mean(1), y.mean(1), dim=-1).mean()
        return 0.5 * (2.0 - tokens - pooled) + 0.25


class Variance(Cosine):
    """A mean over the batch of each channel, held against 1: the number joins a vector."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        x, y = self.tower(left).mean(1), self.tower.emb(right).mean(1)
        return (1 - (x * y).mean(0)).mean()


_PAIR = {"left": ids(), "right": ids()}
CASES = (
    Case("cosine", Cosine, _PAIR, {"dp": 2, "micro_batch": 2}),
    Case("two cosines", TwoCosines, _PAIR, {"dp": 2, "micro_batch": 2}),
    Case("variance", Variance, _PAIR, {"dp": 2, "micro_batch": 2}),
)
