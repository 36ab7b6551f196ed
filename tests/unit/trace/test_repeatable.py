"""Forwards that compute something else at each call, hooks on gradients, parameters changed in passing."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import PlanError, TraceError
from autopar.trace.asked import check_model
from autopar.trace.export import trace

BATCH = {"x": torch.zeros(2, 8), "y": torch.zeros(2, 8)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.calls, self.table, self.last = 0, None, None
        self.seen: list[int] = []

    def scale(self, x: Tensor) -> Any:
        return 1.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh() * self.scale(x)
        return F.mse_loss(x, y)


class Counts(Net):
    def scale(self, x: Tensor) -> Any:
        self.calls += 1
        return self.calls


class Appends(Net):
    def scale(self, x: Tensor) -> Any:
        self.seen.append(1)
        return len(self.seen)


class Remembers(Net):
    last: Any

    def scale(self, x: Tensor) -> Any:
        before, self.last = self.last, x.detach().mean()
        return self.last if before is None else before


class DrawsPython(Net):
    def scale(self, x: Tensor) -> Any:
        return random.random()


class DrawsNumpy(Net):
    def scale(self, x: Tensor) -> Any:
        return float(numpy.random.rand())


class SkipsLayers(Net):
    def scale(self, x: Tensor) -> Any:
        return x if random.random() < 0.5 else 1.0


CHANGING = [Counts, Appends, Remembers, DrawsPython, DrawsNumpy, SkipsLayers]


@pytest.mark.parametrize("kind", CHANGING)
def test_what_changes_from_call_to_call_is_refused_with_its_line(kind: type[nn.Module]) -> None:
    with pytest.raises(TraceError, match=rf"two calls of forward .* differ at {__file__}:\d+"):
        trace(kind(), BATCH, torch.float32)


class CountsAside(Net):
    """What it counts is not computed with."""

    def scale(self, x: Tensor) -> Any:
        self.calls += 1
        return 1.0


class Caches(Net):
    """Of the first call, for all others."""

    table: Any

    def scale(self, x: Tensor) -> Any:
        if self.table is None:
            self.table = torch.ones(8, device=x.device)
        return self.table


class DrawsForNothing(Net):
    def scale(self, x: Tensor) -> Any:
        return 0.0 if random.random() < 0.0 else 1.0


class NoNumber(Net):
    def scale(self, x: Tensor) -> Any:
        return x.masked_fill(x == float("nan"), float("nan"))


class DrawsDropout(Net):
    def scale(self, x: Tensor) -> Any:
        return F.dropout(x, 0.5)


@pytest.mark.parametrize("kind", [CountsAside, Caches, NoNumber, DrawsForNothing, DrawsDropout])
def test_what_does_not_is_traced(kind: type[nn.Module]) -> None:
    assert "aten.mse_loss.default" in {str(node.target) for _, node in trace(kind(), BATCH, torch.float32).each_op()}


class Freezes(Net):
    def scale(self, x: Tensor) -> Any:
        self.layers[0].requires_grad_(False)
        return 1.0


class Ties(Net):
    def scale(self, x: Tensor) -> Any:
        self.layers[1].weight = self.layers[0].weight
        return 1.0


class Replaces(Net):
    def scale(self, x: Tensor) -> Any:
        weight: Any = self.layers[0].weight
        weight.data = weight.data * 0.5
        return 1.0


class Hooks(Net):
    def scale(self, x: Tensor) -> Any:
        if x.requires_grad:
            x.register_hook(lambda grad: -grad)
        return 1.0


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Ties, "replaces the parameter layers.1.weight"),
        (Freezes, "requires_grad of layers.0"),
        (Replaces, "x.data = "),
        (Hooks, "no hooks on gradients"),
    ],
)
def test_what_a_trace_would_lose_is_refused(kind: type[nn.Module], said: str) -> None:
    with pytest.raises(TraceError, match=said):
        trace(kind(), BATCH, torch.float32)


def _hooked(where: str) -> nn.Module:
    model = Net()
    weight: Any = model.layers[0].weight
    if where == "parameter":
        weight.register_hook(lambda grad: grad * 2)
    elif where == "accumulated":
        weight.register_post_accumulate_grad_hook(lambda p: None)
    elif where == "module":
        model.layers[0].register_full_backward_hook(lambda *_: None)
    else:
        model.layers[0].register_full_backward_pre_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("where", ["parameter", "accumulated", "module", "before"])
def test_hooks_on_gradients_are_refused_before_the_trace(where: str) -> None:
    with pytest.raises(PlanError, match=r"layers\.0.* has a hook on its gradient"):
        check_model(_hooked(where))
