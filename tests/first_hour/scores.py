"""A score for each sample, [b] with a gradient, that is read after other layers: losses over pairs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import VOCABULARY, Case, Tower, ids


class RewardPairs(nn.Module):
    """Bradley-Terry: the chosen answer scores higher than the rejected one."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(16, 1)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        def score(ids: Tensor) -> Tensor:
            return self.head(self.tower(ids))[:, -1, 0]

        return -F.logsigmoid(score(chosen) - score(rejected)).mean()


class MarginRanking(nn.Module):
    """Which of two is ranked first is given for each pair; scores are means over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(16, 1)

    def forward(self, first: Tensor, second: Tensor, order: Tensor) -> Tensor:
        scores = [self.head(self.tower(ids)).mean((1, 2)) for ids in (first, second)]
        return F.margin_ranking_loss(scores[0], scores[1], order, margin=0.3)


class Preference(nn.Module):
    """DPO: log probabilities [b] of two answers, held against those that a frozen reference gave before."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(16, VOCABULARY)

    def answer(self, ids: Tensor) -> Tensor:
        """The log probability of each sample's tokens."""
        logits = self.head(self.tower(ids)).log_softmax(-1)
        return logits.gather(2, ids.unsqueeze(2)).squeeze(2).sum(1)

    def forward(self, chosen: Tensor, rejected: Tensor, reference: Tensor) -> Tensor:
        return -F.logsigmoid(0.1 * (self.answer(chosen) - self.answer(rejected) - reference)).mean()


_PAIRS = {"chosen": ids(), "rejected": ids()}
CASES = (
    Case("reward pairs", RewardPairs, _PAIRS),
    Case("margin ranking", MarginRanking, {"first": ids(), "second": ids(), "order": torch.ones(2)}),
    Case("preference", Preference, {**_PAIRS, "reference": torch.zeros(2)}),
)
