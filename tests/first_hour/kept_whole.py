"""What a trace does not have: custom autograd.Functions in the root's forward, and a module of torch that branches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import VOCABULARY, Case, Tower, ids


class Rounded(torch.autograd.Function):
    """Rounds and scales; its backward takes the rounding for the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return torch.round(4 * x) * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return 4 * gradients[0] * scale, (gradients[0] * torch.round(4 * x)).flatten(0, -2).sum(0)


class LogProbability(torch.autograd.Function):
    """Minus the log-probability of each target, with its gradient as softmax − one-hot."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        chances = logits.softmax(-1)
        ctx.save_for_backward(chances, target)
        return -chances.gather(-1, target.unsqueeze(-1)).squeeze(-1).log()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        chances, target = ctx.saved_tensors
        return (chances - F.one_hot(target, chances.shape[-1])) * gradients[0].unsqueeze(-1), None


class QuantizedInput(nn.Module):
    """A Function before the layers; it takes a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.scale, self.head = Tower(), nn.Parameter(torch.ones(16)), nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x: Tensor = Rounded.apply(self.tower.emb(ids), self.scale)  # type: ignore[no-untyped-call]
        for block in self.tower.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class OwnLoss(nn.Module):
    """A Function is the loss of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = LogProbability.apply(self.head(self.tower(ids)), labels)  # type: ignore[no-untyped-call]
        return loss.mean()


class AdaptiveSoftmax(nn.Module):
    """torch's adaptive softmax selects rows by value; its own loss is a mean over them."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.softmax = Tower(), nn.AdaptiveLogSoftmaxWithLoss(16, VOCABULARY, [8, 24])

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.softmax(self.tower(ids).flatten(0, 1), labels.flatten()).loss
        return loss


class AdaptiveRows(AdaptiveSoftmax):
    """Of the adaptive softmax the log-probability of each row is read: samples stay apart."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        rows: Tensor = self.softmax(self.tower(ids).flatten(0, 1), labels.flatten()).output
        return -rows.mean()


_LM = {"ids": ids(), "labels": ids()}
CASES = (
    Case("quantized input", QuantizedInput, _LM, {"dp": 2}),
    Case("own loss", OwnLoss, _LM, {"dp": 2}),
    Case("adaptive softmax", AdaptiveSoftmax, _LM, {"tp": 2}, ("as pinned", "tp2", "pp2", "recompute")),
    Case("adaptive rows", AdaptiveRows, _LM, {"dp": 2}),
)
