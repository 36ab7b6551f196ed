"""Softmax over the samples of the batch, logits [b, b]: one micro-batch, samples gathered over the replicas."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import VOCABULARY, Case, Tower, ids


def _places(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[0], device=logits.device)


class TwoTowers(nn.Module):
    """One tower for both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        logits = self.tower(left).mean(1) @ self.tower(right).mean(1).t()
        return F.cross_entropy(logits, _places(logits))


class SimCSE(nn.Module):
    """Cosines over a temperature, and which sample is whose is given."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.pool = Tower(), nn.Linear(16, 16)

    def forward(self, input_ids: Tensor, other_ids: Tensor, labels: Tensor) -> Tensor:
        one, other = (F.normalize(self.pool(self.tower(x)[:, 0]).tanh(), dim=-1) for x in (input_ids, other_ids))
        return F.cross_entropy(one @ other.t() / 0.05, labels)


class Clip(nn.Module):
    """Images and texts, a learned temperature, both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.patches, self.image = Tower(), nn.Conv2d(3, 16, 4, stride=4), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        text = F.normalize(self.text(input_ids).mean(1), dim=-1)
        image = F.normalize(self.image(self.patches(pixel_values).flatten(2).mean(2)), dim=-1)
        logits = self.scale.exp() * text @ image.t()
        places = _places(logits)
        return (F.cross_entropy(logits, places) + F.cross_entropy(logits.t(), places)) / 2


class TwoViews(nn.Module):
    """R-Drop: every sample twice in one batch, whose halves are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.tower(input_ids.repeat(2, 1)))
        one, other = logits.log_softmax(-1).chunk(2, 0)
        apart = F.kl_div(one, other, reduction="sum", log_target=True) / labels.numel()
        return F.nll_loss(one.flatten(0, 1), labels.flatten()) + apart


class BothSides(nn.Module):
    """Questions and answers through one tower, as one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        one, other = torch.chunk(self.tower(torch.cat([left, right])).mean(1), 2)
        return F.cross_entropy(one @ other.t(), _places(one))


_ONE_MICRO_BATCH = ("as pinned", "tp2", "pp2", "recompute", "one micro-batch")
_PINS = {"dp": 1, "tp": 2, "sequence_parallel": False}
CASES = (
    Case("two towers", TwoTowers, {"left": ids(), "right": ids()}, _PINS, _ONE_MICRO_BATCH),
    Case(
        "simcse",
        SimCSE,
        {"input_ids": ids(), "other_ids": ids(), "labels": torch.zeros(2).long()},
        plans=_ONE_MICRO_BATCH,
    ),
    Case("two views", TwoViews, {"input_ids": ids(), "labels": ids()}),
    Case("both sides", BothSides, {"left": ids(), "right": ids()}, plans=_ONE_MICRO_BATCH),
    Case("clip", Clip, {"input_ids": ids(), "pixel_values": torch.zeros(2, 3, 8, 8)}, plans=_ONE_MICRO_BATCH),
)
