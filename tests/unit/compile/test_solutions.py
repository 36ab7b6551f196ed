"""Placements on cp and tp: which sizes are looked at, which are refused, and what a plan says of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import autopar
from autopar.api import Parallelized
from autopar.errors import PlanError
from autopar.plan.plan import Plan
from autopar.request import Job
from autopar.search.job import cp_sizes
from autopar.search.pins import Pins
from examples.gpt import GPT, GPTConfig

SEQUENCE = 32


@cache
def planned(gpus: int = 2, sequence: int = SEQUENCE, dropout: float = 0.0, **pins: Any) -> Parallelized:
    with torch.device("meta"):
        model = GPT(GPTConfig(64, n_layer=2, n_head=4, d_model=32, block_size=64, dropout=dropout))
    ids = torch.zeros(2, 16, dtype=torch.long, device="meta")
    result: Parallelized = autopar.parallelize(
        model, gpus, gpu="h100-sxm-80gb", inputs={"input_ids": ids, "labels": ids}, sequence=sequence,
        global_batch=4, **pins,
    )  # fmt: skip
    return result


@pytest.mark.parametrize("attention", ["ring", "ulysses", "all_gather"])
def test_each_layout_can_be_pinned(attention: str) -> None:
    result = planned(cp=2, attention=attention)
    plan = result.plan
    assert (plan.mesh.cp, plan.context.name, plan.context.ranks) == (2, attention, 2)
    assert Plan.from_dict(plan.to_dict()) == plan
    assert "cp=2: 2 of 2 attentions by" in result.explain()
    assert f"cp2 ({attention})" in result.source()


def test_the_best_layout_is_found() -> None:
    layouts = {key.context for key in planned(cp=2).solutions}
    assert layouts == {"ring", "ulysses", "all_gather"}
    assert planned(cp=2).plan.context.name in layouts


def test_attention_dropout_is_refused_where_masks_would_differ() -> None:
    with pytest.raises(PlanError, match=r"cp=2 \(attention dropout: .* set it to 0\)"):
        planned(dropout=0.1, cp=2, attention="ring")
    assert planned(dropout=0.1, cp=2).plan.context.name == "ulysses"


def test_s11_lengths_that_do_not_divide_are_refused_with_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"sequence=30 is not divisible by 2 × cp=2.*use 28 or 32"):
        planned(sequence=30, cp=2, attention="ring")
    with pytest.raises(PlanError, match=r"sequence=31 is not divisible by cp=2: use 30 or 32"):
        planned(sequence=31, cp=2)


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(PlanError, match="attention='star': use one of ring, ulysses, all_gather"):
        planned(attention="star")


def test_cp_is_looked_at_for_long_sequences_or_few_samples() -> None:
    program, planned_job = planned().program, planned().job

    def job(**batch: int) -> Job:
        return replace(planned_job, batch=replace(planned_job.batch, **batch))

    short = job(sequence=1024)
    assert cp_sizes(program, short, Pins()) == [1]
    assert cp_sizes(program, job(sequence=32_768), Pins()) == [1, 2]
    assert cp_sizes(program, job(sequence=4096, global_batch=1), Pins()) == [1, 2]
    assert cp_sizes(program, short, Pins(cp=2)) == [2] and cp_sizes(program, short, Pins(attention="ring")) == [2]
