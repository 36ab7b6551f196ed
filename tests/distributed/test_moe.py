"""Mixtures of experts beyond the family of test_families: other models, other experts, other plans."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from autopar.cost_models.describe import describe
from autopar.ir.custom import EXPERTS
from autopar.ir.graph import B, S, info
from autopar.placement import PARTIAL, Shard
from autopar.search.layouts import FREE, MEGATRON, MEGATRON_SP
from tests import models
from tests.distributed.families import family
from tests.distributed.programs import GLOBAL_BATCH, SEQUENCE, STEPS, Subject, assert_parity, subject
from tests.models import RandomCosts
from tests.zoo import VARIANTS

PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2, "micro_batch": 3},
    "tp2-sp": {"tp": 2, "layout": MEGATRON_SP},
    "zero3-tp2-pp2": {"dp": 2, "tp": 2, "pp": 2, "micro_batch": 3, "zero": 3, "recompute": "all"},
}


@cache
def variant(name: str) -> Subject:
    chosen = VARIANTS[name]
    model = models.seeded(chosen.build, meta=False)
    generator = torch.Generator().manual_seed(0)
    data = [chosen.inputs(GLOBAL_BATCH, generator) for _ in range(STEPS)]
    inputs = {**{key: value[:2] for key, value in data[0].items()}, **chosen.arguments}
    return subject(model, torch.float64, models.layered(model, inputs, torch.float64), data)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("qwen3_moe:sdpa", "tp2-sp"),
        pytest.param("qwen3_moe:sdpa", "zero3-tp2-pp2", marks=pytest.mark.slow),
        ("gpt_oss:eager", "dp2"),
        pytest.param("gpt_oss:eager", "zero3-tp2-pp2", marks=pytest.mark.slow),
    ],
)
def test_other_mixtures(name: str, plan: str) -> None:
    """gpt_oss's experts have biases and a gate of their own: they are an opaque module."""
    made = variant(name)
    assert made.program.opaque.keys() == ({"mlp.experts"} if name.startswith("gpt_oss") else set())
    assert_parity(made, made.plan(**PLANS[plan]))


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 5))])
def test_random_plans(seed: int) -> None:
    made = family("mixtral", torch.float64)
    assert_parity(made, made.plan(dp=2, tp=2, micro_batch=3, layout=FREE, costs=RandomCosts(seed)))


def test_tensor_parallelism_is_inside_each_expert() -> None:
    """Gate and up by rows, down by columns, and the result a summand; nearly all of the work is divided."""
    made = family("mixtral", torch.float64)
    solution = made.plan(tp=2, layout=MEGATRON).solution
    node = next(n for _, n in made.program.each_op() if n.target is EXPERTS)
    layer = next(b.name for b, n in made.program.each_op() if n is node)
    strategy = solution.strategies[layer][node.name]
    assert strategy.inputs[3:] == (Shard(1), Shard(1), Shard(2)) and strategy.output == PARTIAL
    assert info(node).shape == (B * S, 32)
    assert describe(made.program, solution, {B: 4, S: SEQUENCE}).sharded_fraction > 0.95
