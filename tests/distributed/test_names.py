"""A model's names beside those that model.py uses itself: inputs called as modules are, attributes as methods are."""

from __future__ import annotations

from typing import Any

import pytest
import torch as t
from torch import Tensor, nn
from torch.nn import functional

from autopar.emit.names import check_attributes
from autopar.errors import PlanError
from tests.distributed.programs import assert_parity, subject
from tests.models import layered


class Shadowing(nn.Module):
    """Inputs `F`, `torch` and `nn`, each where model.py calls a function of the module of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, F: Tensor, torch: Tensor, nn: Tensor) -> Tensor:  # noqa: N803 - the point
        x = functional.layer_norm(F, (8,))
        for layer in self.layers:
            x = x + functional.gelu(layer(x)) * t.tanh(nn).unsqueeze(-1)
        return functional.cross_entropy(x, t.where(nn > -1, torch, -100))


@pytest.mark.parametrize("plan", [{"dp": 2, "micro_batch": 3}, {"pp": 2, "recompute": "all"}, {"tp": 2}], ids=str)
def test_inputs_do_not_hide_the_modules_of_their_name(plan: dict[str, Any]) -> None:
    t.manual_seed(0)
    data = [{"F": t.randn(12, 8).double(), "torch": t.randint(8, (12,)), "nn": t.randn(12).double()} for _ in range(5)]
    model = Shadowing().double()
    made = subject(model, t.float64, layered(model, {k: v[:2] for k, v in data[0].items()}, t.float64), data)
    assert "def count_targets(" in made.source(made.plan(**plan))
    assert_parity(made, made.plan(**plan))


class Named(nn.Module):
    """Three lists of layers with something between each two; one attribute or input has the name asked for."""

    def __init__(self, attribute: str) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(3))
        self.norm, self.attribute = nn.LayerNorm(8), attribute
        self.add_module(attribute, nn.LayerNorm(8))

    def forward(self, x: Tensor) -> Tensor:
        for layers, between in (
            (self.first, self.norm), (self.second, self.get_submodule(self.attribute)), (self.third, self.norm),
        ):  # fmt: skip
            for layer in layers:
                x = x + layer(x).relu()
            x = between(x)
        return x.square().sum()


class Ranged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, range: Tensor) -> Tensor:
        for layer in self.layers:
            range = layer(range)
        return range.square().sum()


def test_names_of_methods_are_reserved() -> None:
    """`_between2` as `_between` is, but only where the class has a method of that name."""
    x = {"x": t.zeros(2, 8)}
    check_attributes(layered(Named("other"), x, t.float32))
    check_attributes(layered(Named("_between7"), x, t.float32))
    for name in ("_between", "_between2"):
        with pytest.raises(PlanError, match=f"{name}.weight of Named has a name that the emitted class uses itself"):
            check_attributes(layered(Named(name), x, t.float32))
    with pytest.raises(PlanError, match="the input range of Ranged has a name"):
        check_attributes(layered(Ranged(), {"range": t.zeros(2, 8)}, t.float32))
