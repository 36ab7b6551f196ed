"""Images and other floating inputs: taken as they come, in fp32, whatever the precision of the program."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import models
from tests.distributed.families import family
from tests.distributed.half import assert_half
from tests.distributed.programs import GLOBAL_BATCH, STEPS, TOLERANCE, Subject, assert_parity, parity, subject

PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "zero3": {"dp": 2, "micro_batch": 3, "zero": 3},
    "pp2": {"pp": 2},
}


class Regression(nn.Module):
    """Features to a number a sample; the mean loss is over samples."""

    def __init__(self, d: int = 24, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(layers)
        )
        self.head = nn.Linear(d, 1)

    def forward(self, features: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            features = features + layer(features)
        return F.mse_loss(self.head(features).squeeze(-1), target)


@cache
def regression(dtype: torch.dtype) -> Subject:
    """Its data are in fp32 always, also where its reference is in fp64."""
    torch.manual_seed(0)
    model = Regression()
    data = [{"features": torch.randn(GLOBAL_BATCH, 24), "target": torch.randn(GLOBAL_BATCH)} for _ in range(STEPS)]
    program = models.layered(model, {name: x[:2] for name, x in data[0].items()}, dtype)
    assert {t.dtype for t in program.inputs.values()} == {dtype}
    return subject(model, dtype, program, data)


def made(name: str, dtype: torch.dtype) -> Subject:
    return regression(dtype) if name == "regression" else family(name, dtype)


@pytest.mark.parametrize(
    ("name", "plan"), [("vit", "tp2"), ("vit", "zero3"), ("regression", "zero3"), ("regression", "pp2")]
)
def test_bf16(name: str, plan: str) -> None:
    half = made(name, torch.bfloat16)
    assert half.data and all(x.dtype != torch.bfloat16 for x in half.data[0].values())
    assert not half.program.opaque
    assert_half(half, half.plan(**PLANS[plan]))


@pytest.mark.parametrize("name", ["vit", "regression"])
def test_fp32(name: str) -> None:
    """A key bias of ViT has a true gradient of zero, which fp32 drowns in rounding: test_families compares in fp64."""
    single = made(name, torch.float32)
    errors = parity(single, single.plan(**PLANS["zero3"]))
    gradient, worst = errors.gradients
    assert max(errors.loss, errors.norm, errors.weights[0]) <= TOLERANCE["fp32"], errors
    assert gradient <= TOLERANCE["fp32"] or worst.endswith("k_proj.bias"), errors


def test_fp64_programs_raise_fp32_inputs() -> None:
    double = regression(torch.float64)
    raised = [{name: x.double() for name, x in batch.items()} for batch in double.batches]
    given = Subject(double.model, double.program, double.dtype, double.data)
    given.__dict__["reference"] = given.reference_on(raised)  # of the same numbers in fp64
    assert_parity(given, double.plan(dp=2, micro_batch=3))


def test_whisper_traces_in_bf16() -> None:
    program = family("whisper", torch.bfloat16).program
    assert not program.opaque
    assert program.inputs["input_features"].dtype == torch.bfloat16
