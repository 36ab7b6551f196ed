"""The loss in slices of the vocabulary trains as the original does, under every way of spreading it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost_models.describe import describe
from autopar.cost_models.hardware import Cluster, gpu
from autopar.cost_models.step_time import estimate
from autopar.errors import PlanError
from autopar.ir.graph import B, S
from autopar.plan.plan import Plan
from autopar.runtime.memory import LiveStorage
from autopar.search.layouts import MEGATRON_SP, replicated
from autopar.search.op_costs import TimeCosts
from tests.distributed.half import assert_half
from tests.distributed.programs import Subject, assert_parity, gpt, llama, parallel, qwen, subject, trainer_of
from tests.harness import run_ranks

MODELS: dict[str, Callable[[torch.dtype], Subject]] = {"gpt": gpt, "llama": llama, "qwen2": qwen, "parallel": parallel}
# A vocabulary of 97: over tp2 49 and 48 columns, in 3 slices 17, 17 and 15.
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "one rank": ("llama", {}),
    "tp2, tied": ("gpt", {"tp": 2}),
    "tp2-sp, tied": ("qwen2", {"tp": 2, "layout": MEGATRON_SP}),
    "zero3": ("llama", {"dp": 2, "micro_batch": 3, "zero": 3}),
    "zero3, tied": ("gpt", {"dp": 2, "micro_batch": 3, "zero": 3}),
    "pp2-gpipe": ("parallel", {"pp": 2, "schedule": "gpipe"}),
    "pp2-tp2, tied over stages": ("gpt", {"pp": 2, "tp": 2}),
    "dp2-tp2, zero3": ("gpt", {"dp": 2, "tp": 2, "micro_batch": 3, "zero": 3}),
}


def plan_of(name: str, dtype: torch.dtype, chunks: int = 3) -> tuple[Subject, Plan]:
    model, choices = PLANS[name]
    made = MODELS[model](dtype)
    return made, made.plan(**choices).changed(loss_chunks=chunks)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", PLANS)
def test_fp64(name: str) -> None:
    made, plan = plan_of(name, torch.float64)
    assert "linear_cross_entropy(" in made.source(plan)
    assert_parity(made, plan)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", ["tp2, tied", "zero3"])
def test_fp32(name: str) -> None:
    assert_parity(*plan_of(name, torch.float32))


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", ["pp2-tp2, tied over stages", "dp2-tp2, zero3"])
def test_bf16(name: str) -> None:
    assert_half(*plan_of(name, torch.bfloat16))


class Capped(nn.Module):
    """Gemma's head: a bias, a soft cap, labels shifted by slicing the logits; the body may be frozen."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(97, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 97)
        if frozen:
            self.embedding.requires_grad_(False)
            self.layers.requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        logits = self.head(x) * 0.5
        logits = torch.tanh(logits / 2.0) * 2.0
        return F.cross_entropy(logits[:, :-1].reshape(-1, 97), labels[:, 1:].reshape(-1))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("choices", [{"tp": 2}, {"dp": 2, "micro_batch": 3, "zero": 3}], ids=str)
def test_a_capped_head_on_fewer_rows(choices: dict[str, Any], frozen: bool) -> None:
    torch.manual_seed(0)
    made = subject(Capped(frozen), torch.float64)
    # At the sizes of a test summing logits over ranks would be cheaper than to share the vocabulary.
    costs = TimeCosts(gpu("h100-sxm-80gb"), "fp64", 2, {B: 64, S: 4096})
    plan = made.plan(**choices, costs=costs).changed(loss_chunks=4)
    assert "softcap=2.0" in made.source(plan) and "scale=0.5" in made.source(plan)
    assert_parity(made, plan)


class Smoothed(Capped):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embedding(input_ids)).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), label_smoothing=0.1)


def test_a_loss_that_cannot_be_sliced_is_refused_with_its_reason() -> None:
    made = subject(Smoothed(), torch.float64)
    with pytest.raises(PlanError, match="loss_chunks=2: .*label smoothing"):
        made.source(made.plan().changed(loss_chunks=2))


class Wide(nn.Module):
    """Logits that are nearly all of a step's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(97, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 4099, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_holds_as_much_less_as_the_ledger_says(dtype: torch.dtype) -> None:
    """M1: the peak of whole steps, with whole logits and in 8 slices: they differ by the ledger's line for logits."""
    made = subject(Wide(), dtype)
    plans = [made.plan(micro_batch=12).changed(loss_chunks=chunks) for chunks in (1, 8)]
    costs = describe(made.program, replicated(made.program), {B: 12, S: 16})
    estimates = [estimate(costs, plan, Cluster(1)).stages[0].memory for plan in plans]
    logits = [sum(t.size_bytes for t in terms if t.name.startswith("logits")) for terms in estimates]
    sources, weights, batch = [made.source(plan) for plan in plans], made.weights, made.batches[0]

    def peaks(rank: int) -> list[int]:
        found = []
        for source in sources:
            with LiveStorage() as storage:
                trainer = trainer_of(source, weights)
                trainer.step(batch)
                storage.reset()
                before = storage.peak
                trainer.step(batch)
                found.append(int(storage.peak - before))
        return found

    ((whole, sliced),) = run_ranks(1, peaks)
    assert whole - sliced == pytest.approx(logits[0] - logits[1], rel=0.1)
    assert sliced < 12 * 16 * 4099 * 4  # the logits of the loss, once
