"""What a trace must not lose: in-place ops, kwargs of norms, shifted logits; or must refuse, with the line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import TraceError
from tests.distributed.programs import VOCABULARY, assert_parity, subject

FP64 = torch.float64
D = 16


class Base(nn.Module):
    """An embedding, one layer of a list, a head; what happens between is `middle`."""

    def __init__(self, middle: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, D)
        self.layers = nn.ModuleList([nn.Linear(D, D)])
        self.head = nn.Linear(D, VOCABULARY, bias=False)
        self.middle = middle or (lambda x: x)

    def hidden(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.middle(x)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.hidden(input_ids)).flatten(0, 1), labels.flatten())


def assigned(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = 0
    return x


def through_a_view(x: Tensor) -> Tensor:
    x.view(-1, D).mul_(2)
    return x


def in_place(x: Tensor) -> Tensor:
    y = x * 2
    y.add_(1.0)
    y.relu_()
    return y


def rms_with_alpha(x: Tensor) -> Tensor:
    return x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), 0.1, alpha=3))


def rms_other_order(x: Tensor) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * x


def unbound(x: Tensor) -> Tensor:
    first, second = x.unflatten(-1, (2, D // 2)).unbind(-2)
    return torch.cat((first * 2, second), -1)


class ShiftedLogits(Base):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.hidden(input_ids))
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))


class Counting(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        calls = self.get_buffer("calls").add_(1)
        loss: Tensor = super().forward(input_ids, labels)
        return loss * calls


class Probabilities(Base):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.hidden(input_ids)).flatten(0, 1)
        targets = F.one_hot(labels.clamp(min=0).flatten(), VOCABULARY).to(logits.dtype)
        return F.cross_entropy(logits, targets)


class DifferentTables(Base):
    """Layers of one class that read different tables: a loop that gives all of them the first one's is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scaled() for _ in range(3)])

    def hidden(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).to(FP64)
        tables = (positions.cos()[:, None], positions.sin()[:, None])
        x: Tensor = self.embedding(input_ids)
        for i, layer in enumerate(self.layers):
            x = layer(x, tables[i % 2])
        return x


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x.add(self.linear(x) * table)


@pytest.mark.parametrize(
    "model",
    [
        DifferentTables(), Base(in_place), Base(assigned), Base(through_a_view), Base(rms_with_alpha),
        Base(rms_other_order), Base(unbound), ShiftedLogits(), Probabilities(),
    ],
    ids=[
        "different tables",
        "in place",
        "a slice is assigned",
        "through a view",
        "an rms norm with alpha",
        "an rms norm the other way",
        "unbind",
        "shifted logits",
        "soft targets",
    ],
)  # fmt: skip
def test_nothing_is_lost(model: nn.Module) -> None:
    traced = subject(model, FP64)
    assert_parity(traced, traced.plan(dp=2, micro_batch=3))


def test_a_counter_is_refused() -> None:
    with pytest.raises(TraceError, match="in-place op add_|changes the buffers calls"):
        subject(Counting(), FP64)
