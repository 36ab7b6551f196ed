"""Layers under torch.compile train as the original does; what is priced of them is what torch makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from autopar.plan.plan import Plan
from autopar.runtime import compiled
from autopar.search.layouts import MEGATRON_SP
from tests.distributed.half import assert_half
from tests.distributed.programs import Subject, assert_parity, gpt, llama, local_batch, parity, trainer_of
from tests.harness import run_ranks


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs forward and backward as for inductor, run by torch's own kernels: C++ takes half a minute to compile."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    yield


def of(subject: Subject, **choices: Any) -> tuple[Subject, Plan]:
    return subject, subject.plan(**choices).changed(compile=True)


CASES: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "zero3-recompute": {"dp": 2, "micro_batch": 3, "zero": 3, "recompute": (0,)},
}
SLOW: dict[str, dict[str, Any]] = {
    "pp2-tp2-sp-recompute": {"pp": 2, "tp": 2, "layout": MEGATRON_SP, "recompute": (1,)},
    "dp2-tp2-zero3-recompute": {"dp": 2, "tp": 2, "micro_batch": 3, "zero": 3, "recompute": "all"},
    "pp2-zero1": {"pp": 2, "dp": 2, "micro_batch": 3, "zero": 1},
}


@pytest.mark.in_turn(2)
@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_fp64(name: str) -> None:
    make = llama if name == "zero3-recompute" else gpt
    subject, plan = of(make(torch.float64, layers=2), **{**CASES, **SLOW}[name])
    assert "compile=True" in subject.source(plan)
    assert_parity(subject, plan)


@pytest.mark.slow
@pytest.mark.usefixtures("no_kernels")
def test_bf16() -> None:
    assert_half(*of(llama(torch.bfloat16, layers=2), dp=2, micro_batch=3, zero=3))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_with_the_kernels_of_inductor(dtype: torch.dtype) -> None:
    subject, plan = of(gpt(dtype, layers=2), tp=2)
    errors = parity(subject, plan, timeout=600)
    assert errors.worst <= {torch.float64: 1e-9, torch.float32: 1e-5}[dtype], errors


@pytest.mark.usefixtures("no_kernels")
def test_a_class_is_one_graph_with_its_collectives() -> None:
    """What is priced: pointwise ops in one kernel wherever no product, attention or collective is between them."""
    subject, plan = of(gpt(torch.float32, layers=3), tp=2)
    source, weights, batch = subject.source(plan), subject.weights, subject.batches[0]

    def graphs(rank: int) -> tuple[int, int]:
        counters.clear()
        trainer = trainer_of(source, weights)
        trainer.step(local_batch(trainer, batch))
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    assert run_ranks(2, graphs, timeout=120) == [(1, 0), (1, 0)]


@pytest.mark.usefixtures("no_kernels")
def test_dropout_has_the_masks_of_the_program_without_compile() -> None:
    """Also where backward computes the layer again: the same mask as forward."""
    subject = gpt(torch.float64, layers=2, dropout=0.3)
    plans = [subject.plan(recompute=(1,)).changed(compile=on) for on in (False, True)]
    sources, weights, batch = [subject.source(plan) for plan in plans], subject.weights, subject.batches[0]

    def gradients(rank: int) -> list[dict[str, torch.Tensor]]:
        found = []
        for source in sources:
            trainer = trainer_of(source, weights)
            trainer.step(local_batch(trainer, batch))
            found.append(trainer.gradients())
        return found

    ((plain, compiled_),) = run_ranks(1, gradients, timeout=120)
    for name, gradient in plain.items():
        torch.testing.assert_close(compiled_[name], gradient, rtol=1e-9, atol=1e-12)
