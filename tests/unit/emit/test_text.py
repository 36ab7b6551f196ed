"""Sizes and literals as Python: what the text evaluates to is the value."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Mod

from autopar.emit.text import literal, size_text
from autopar.errors import PlanError
from autopar.ir.graph import B, S

SIZES = {
    "64": sympy.Integer(64),
    "s": S,
    "b * s": B * S,
    "s // 2": S / 2,
    "b * s // 2": B * S / 2,
    "(s + 2) // 4": (S + 2) / 4,
    "s**2": S**2,
    "b * s**2": B * S**2,
    "(b + s)**2": (B + S) ** 2,
    "s - 1": S - 1,
    "2 * s + 1": 2 * S + 1,
    "b * (s + 1)": B * (S + 1),
    "-s": -S,
    "s // 3": FloorDiv(S, 3),
    "b * (s // 3)": B * FloorDiv(S, 3),
    "s - s // 3": S - FloorDiv(S, 3),
    "-(s // 3)": -FloorDiv(S, 3),
    "s % 3": Mod(S, 3),
    "max(b, s)": sympy.Max(B, S),
}


@pytest.mark.parametrize("text", SIZES)
def test_sizes(text: str) -> None:
    expr = SIZES[text]
    assert size_text(expr) == text
    for b, s in ((4, 6), (6, 10), (8, 2)):
        assert eval(text, {"b": b, "s": s}) == expr.subs({B: b, S: s})


def test_a_size_without_a_form_is_refused() -> None:
    with pytest.raises(PlanError, match=r"log\(s\)"):
        size_text(sympy.log(S))


@pytest.mark.parametrize("value", [1, -0.5, True, None, math.inf, -math.inf, 'a "quoted" \\ word', (1, 2.5), (S.name,)])
def test_literals_evaluate_to_the_value(value: Any) -> None:
    assert eval(literal(value)) == value


def test_literals_of_torch_and_not_a_number() -> None:
    assert literal(torch.bfloat16) == "torch.bfloat16"
    assert math.isnan(eval(literal(math.nan)))
