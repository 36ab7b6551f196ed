"""Every choice of recompute: the contract, the same masks, no gather more than without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.search.layouts import MEGATRON_SP

from .programs import assert_parity, gpt, llama

# A choice a half of the layers where there are two: a bar parts them.
CHOICES = (
    "attention core",
    "attention",
    "activation",
    "mlp",
    "attention core, activation",
    "attention, mlp",
    "attention core | mlp",
    "attention | attention core, activation",
    "mlp | all",
    "none | attention, activation",
    "all",
    "groups of 2",
    "groups of 2 | attention",
    "all | groups of 2",
)
PLANS: dict[str, dict[str, Any]] = {
    "tp2-sp": {"tp": 2, "layout": MEGATRON_SP},
    "pp2": {"pp": 2},
    "zero3": {"dp": 2, "micro_batch": 3, "zero": 3},
}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("choice", CHOICES)
def test_each_choice_keeps_the_contract(choice: str) -> None:
    """On one of the plans each, over two models."""
    place = CHOICES.index(choice)
    subject = (gpt, llama)[place % 2](torch.float64)
    assert_parity(subject, subject.plan(**list(PLANS.values())[place % 3], recompute=choice))


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", [gpt, llama])
def test_each_choice_on_each_plan(model: Any, plan: str, choice: str) -> None:
    subject = model(torch.float64)
    assert_parity(subject, subject.plan(**PLANS[plan], recompute=choice))
