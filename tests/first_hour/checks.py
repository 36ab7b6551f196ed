"""Checks of values that only raise: the program has none of them. (No test module: pytest rewrites its assertions.)"""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import VOCABULARY, Case, Tower, ids


def positive(x: Tensor) -> bool:
    return bool((x > 0).all())


def check_positive(x: Tensor) -> None:
    if not positive(x):
        message = "not positive"
        raise RuntimeError(message)


class Checked(nn.Module):
    """In its own forward, in a helper of the user's, and with a number that is read for the check alone."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        if ids.dim() > 2 or (ids >= VOCABULARY).any():
            raise ValueError(f"ids up to {ids.max()}")
        largest = labels.max().item()
        assert largest < VOCABULARY, largest
        x = self.tower(ids)
        check_positive(x.exp())
        if torch.isfinite(x).all():
            x = x * 2
        else:
            raise FloatingPointError("not finite")
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class CheckedLengths(nn.Module):
    """Against the length of the batch, which torch keeps as an assertion of its own; and an empty cache is extended."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        assert lengths.max().item() <= ids.shape[1]
        x = torch.cat([torch.tensor([], device=ids.device), self.tower(ids)], dim=-2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Likelihood(nn.Module):
    """torch's distributions check what they are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.tower(ids))
        loss: Tensor = -torch.distributions.Categorical(logits=logits).log_prob(labels).mean()
        return loss


class CheckedLayer(nn.Module):
    """A layer that checks what it takes stays a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        assert not torch.isnan(x).any(), "NaN"
        return x + F.gelu(self.mix(x))


class CheckedLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(16, VOCABULARY)
        self.tower.blocks = nn.ModuleList(CheckedLayer() for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.tower(ids)).flatten(0, 1), labels.flatten())


class CheckedTable(Checked):
    """Of one length alone, so that it is traced twice."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(8, 16))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tower(ids) + self.positions
        if x.isnan().any():
            raise FloatingPointError("NaN")
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Caught(Checked):
    """What a check raises is caught: it is no check alone."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tower(ids)
        try:
            check_positive(x)
        except RuntimeError:
            x = x * 2
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Suppressed(Checked):
    """What a check raises ends the `with`: it is no check alone."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tower(ids)
        with contextlib.suppress(ValueError):
            if (x < VOCABULARY).all():
                raise ValueError("small")
            x = x * 2
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Asserted(Checked):
    """What an assertion raises is caught; torch would take it for true."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tower(ids)
        try:
            assert (ids < 0).all().item()
        except AssertionError:
            x = x * 2
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class AssertedLater(Checked):
    """The number is read before."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, largest = self.tower(ids), ids.max().item()
        try:
            torch._check(largest < 0)
        except RuntimeError:
            x = x * 2
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Swallowing(contextlib.AbstractContextManager["Swallowing"]):
    def __exit__(self, *raised: object) -> bool:
        return True


class Swallowed(Checked):
    """A context of the user's ends what a check raises, and what torch raises in a trace."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tower(ids)
        with Swallowing():
            assert (x < 0).all()
            x = x * 2
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Tried(Checked):
    """A handler of everything catches what torch raises in a trace."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tower(ids)
        try:
            x = x * 3 if (x > 0).all() else x
        except Exception:
            x = x * 2
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Naming(Checked):
    """A check whose test computes what the loss reads."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tower.emb(ids)
        if (x := self.tower(ids)).isnan().any():
            raise FloatingPointError("NaN")
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Remembering(Checked):
    """A check that leaves something behind before it raises."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        if (ids >= VOCABULARY).any():
            self.wrong = True
            raise ValueError("ids")
        return super().forward(ids, labels)


class Touching(Checked):
    """A check whose test calls what sets what the loss reads."""

    def touch(self, x: Tensor) -> bool:
        self.kept = x * 2
        return bool(x.isfinite().all())

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        self.kept = self.tower(ids)
        assert self.touch(self.kept)
        return F.cross_entropy(self.head(self.kept).flatten(0, 1), labels.flatten())


_LM = {"ids": ids(), "labels": ids()}
CASES = (
    Case("checked", Checked, _LM, {"dp": 2}),
    Case("checked lengths", CheckedLengths, {**_LM, "lengths": torch.zeros(2).long()}, {"dp": 2}),
)
