"""Forwards that return more than the loss: by name, several losses by name, after the logits."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .case import VOCABULARY, Case, Tower, ids


class Tagger(nn.Module):
    """What its subclasses share: logits, and the mean loss of the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(16, VOCABULARY)

    def terms(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The logits and the loss."""
        logits = self.head(self.tower(ids))
        return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class DictLoss(Tagger):
    """{"loss": …, "logits": …}"""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits, loss = self.terms(ids, labels)
        return {"loss": loss, "logits": logits}


class NamedTerms(Tagger):
    """The loss after its terms, which are 0-dim too."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits, loss = self.terms(ids, labels)
        penalty = logits.square().mean()
        return {"cross_entropy": loss, "penalty": penalty, "loss": loss + 0.01 * penalty}


class LossLast(Tagger):
    """(logits, loss), as nanoGPT."""

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.terms(ids, labels)


_TEXT = {"ids": ids(), "labels": ids()}
CASES = (
    Case("dict loss", DictLoss, _TEXT, {"dp": 2}),
    Case("named terms", NamedTerms, _TEXT),
    Case("loss last", LossLast, _TEXT),
)
