"""Faults of data parallelism that uses of a parameter decide: a block that runs twice, a head that does not run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.programs import VOCABULARY, assert_parity, batches, gpt, local_batch, subject, trainer_of
from tests.harness import run_ranks

FP64 = torch.float64


class Twice(nn.Module):
    """Two blocks, run one after the other twice over; a spare head, and a spare weight in each block, do not run."""

    def __init__(self) -> None:
        super().__init__()
        block = gpt(FP64, 2).model.get_submodule("transformer.h.0")
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(2))
        for each in self.blocks:
            each.spare = nn.Linear(3, 3)
        self.embedding, self.norm = nn.Embedding(VOCABULARY, 32), nn.LayerNorm(32)
        self.head, self.spare_head = nn.Linear(32, VOCABULARY), nn.Linear(32, 2)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("plan", ["zero0", "zero1", "zero2", "zero3", "zero3-pp2"])
def test_z10_a_block_used_twice_with_recompute_and_weights_that_do_not_run(plan: str) -> None:
    model = subject(Twice(), FP64)
    more: dict[str, Any] = {"pp": 2} if plan.endswith("pp2") else {}
    assert_parity(model, model.plan(dp=2, micro_batch=3, zero=int(plan[4]), recompute="all", **more))


def test_z10_what_does_not_run_keeps_its_value_and_has_no_gradient_or_state() -> None:
    model = subject(Twice(), FP64)
    source = model.source(model.plan(dp=2, micro_batch=3, zero=3))
    spare = [name for name in model.weights if "spare" in name]
    assert len(spare) == 6

    def on_rank(rank: int) -> None:
        trainer = trainer_of(source, model.weights)
        trainer.step(local_batch(trainer, batches(1)[0]))
        state = trainer.state_dict()
        assert not trainer.gradients().keys() & set(spare)
        assert not any(trainer.optimizer.states(name) for name in spare)
        for name in spare:
            assert torch.equal(state[name], model.weights[name])

    run_ranks(2, on_rank)
