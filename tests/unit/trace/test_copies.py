"""Models that have run before they are planned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.trace.copies import copied


class Remembers(nn.Module):
    """Keeps what its layers made, in an attribute and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last: Any = None
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        self.last, self.seen = x, [x.mean()]
        return x.square().mean()


def test_what_forward_has_left_is_copied_without_its_graph() -> None:
    model = Remembers()
    model(torch.ones(2, 8))
    other = copied(model)
    assert other.last.is_leaf and other.last.equal(model.last) and other.last is not model.last
    assert other.seen[0].is_leaf and other.layers[0].weight is not model.layers[0].weight


def test_a_model_that_has_run_is_planned_and_verified() -> None:
    model = Remembers()
    model(torch.ones(2, 8)).backward()
    result = autopar.parallelize(model, 2, gpu="cpu", inputs={"x": torch.zeros(2, 8)}, global_batch=4, dp=2)
    assert result.plan.mesh.dp == 2 and "Remembers" in str(result)
    assert result.verify(1).holds
