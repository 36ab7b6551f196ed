"""Layer objects that a model uses several times, in irregular order, and with inputs that differ between the uses."""

from __future__ import annotations

import ast
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.search.layouts import MEGATRON_SP
from tests import models
from tests.distributed.programs import Subject, assert_parity, subject

SAMPLES, SEQUENCE, STEPS = 4, 8, 2


class Scale(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(x * self.scale)


class Feedforward(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return result


class Reused(nn.Module):
    """Two layers of two classes, one after the other, `repeats` times.

    frozen: the first use of the first layer gets a hidden state without a gradient, the others one with.
    """

    def __init__(self, repeats: int = 2, frozen: bool = False, d: int = 16) -> None:
        super().__init__()
        self.repeats = repeats
        self.embed = nn.Linear(5, d)
        self.layers = nn.ModuleList([Scale(d), Feedforward(d)])
        self.head = nn.Linear(d, 12)
        self.embed.requires_grad_(not frozen)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(features)
        for _ in range(self.repeats):
            for layer in self.layers:
                x = layer(x)
        return F.mse_loss(self.head(x), labels)


@cache
def reused(frozen: bool) -> Subject:
    model = models.seeded(lambda: Reused(frozen=frozen), meta=False)
    generator = torch.Generator().manual_seed(0)

    def draw(size: int) -> Tensor:
        return torch.randn(SAMPLES, SEQUENCE, size, generator=generator, dtype=torch.float64)

    data = [{"features": draw(5), "labels": draw(12)} for _ in range(STEPS)]
    inputs = {name: value[:2] for name, value in data[0].items()}
    return subject(model, torch.float64, models.layered(model, inputs, torch.float64), data)


SIZES = {"micro_batch": 2, "global_batch": SAMPLES, "sequence": SEQUENCE}
PLANS = {
    "tp2-sp": {"tp": 2, "layout": MEGATRON_SP, "zero": 1, "recompute": "all"},
    "pp2": {"pp": 2},
    "dp2-zero3": {"dp": 2, "zero": 3},
}


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_reused_layers(plan: str, frozen: bool) -> None:
    made = reused(frozen)
    assert_parity(made, made.plan(**SIZES, **PLANS[plan]))  # type: ignore[arg-type]


def test_a_layer_with_two_classes_belongs_to_the_model() -> None:
    """One module has one forward: where its uses differ, each is a method of the model, and no other is lost."""
    program = reused(frozen=True).program
    assert [program.is_between(call.block) for call in program.layer_calls] == [True] * 4
    assert not any(program.is_between(call.block) for call in reused(frozen=False).program.layer_calls)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("pp", [1, 2])
def test_names_are_defined_and_parameters_declared_once(pp: int, frozen: bool) -> None:
    """PATHS is where the paths of irregular layers are; with one stage nothing is declared twice."""
    made = reused(frozen)
    source = made.source(made.plan(pp, **SIZES))  # type: ignore[arg-type]
    tree = ast.parse(source)
    defined = {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets}  # type: ignore[attr-defined]
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id.isupper() and len(n.id) > 1}
    assert used <= defined
    assert ("PATHS" in used) == (not frozen)
    declared = [line.strip() for line in source.splitlines() if line.strip().startswith(("submodule(", "parameter("))]
    assert pp > 1 or len(declared) == len(set(declared))
