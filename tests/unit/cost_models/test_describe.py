"""What describe counts of a traced program."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.compile.compiler import prepare
from autopar.cost_models.collectives import axis_group, collective_time_s
from autopar.cost_models.describe import describe
from autopar.cost_models.hardware import Cluster
from autopar.cost_models.layer_costs import ModelCosts
from autopar.cost_models.step_time import estimate
from autopar.ir.graph import B, S
from autopar.plan.plan import Plan
from autopar.runtime.choices import Mesh
from autopar.search.layouts import replicated
from examples.gpt import GPTConfig, build
from tests.models import VOCABULARY

CONFIG = GPTConfig(vocab_size=VOCABULARY, n_layer=1, n_head=2, d_model=32)
VALUES = {B: 2, S: 16}


def kept_by_the_epilogue(precision: str) -> float:
    ids = torch.zeros(2, 16, dtype=torch.long)
    program = prepare(build(CONFIG), {"input_ids": ids, "labels": ids}, precision)
    costs = describe(program, replicated(program), VALUES)
    return float(costs.epilogue.saved_bytes.subs(VALUES))


@pytest.mark.parametrize(("precision", "itemsize"), [("bf16", 2), ("fp32", 4)])
def test_logits_are_kept_in_fp32(precision: str, itemsize: int) -> None:
    """N8: bf16 logits are cast at the loss, so fp32 is what backward keeps. Beside them: norm input and output."""
    tokens, d = 2 * 16, 32
    norm = 2 * itemsize * tokens * d + 2 * 4 * tokens
    expected = 4 * tokens * VOCABULARY + norm
    assert kept_by_the_epilogue(precision) == pytest.approx(expected, abs=4)  # and the loss itself


class Coupled(nn.Module):
    """Reads buffers of the model; its loss has a square of a mean over all samples."""

    table: torch.Tensor
    weights: torch.Tensor

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, d)
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(2))
        self.head = nn.Linear(d, VOCABULARY)
        self.register_buffer("table", torch.rand(64, d), persistent=False)
        self.register_buffer("weights", torch.rand(VOCABULARY))
        self.register_buffer("unread", torch.rand(VOCABULARY))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids) + self.table[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        loss = F.cross_entropy((self.head(x) * self.weights).flatten(0, 1), labels.flatten())
        total: torch.Tensor = loss + x.mean((0, 1)).square().sum()
        return total


def coupled() -> ModelCosts:
    ids = torch.zeros(2, 16, dtype=torch.long)
    program = prepare(Coupled(), {"input_ids": ids, "labels": ids}, "fp32")
    return describe(program, replicated(program), VALUES)


def test_buffers_that_a_stage_reads_are_in_the_ledger() -> None:
    costs = coupled()
    assert costs.constants_bytes + costs.prologue.buffer_bytes == 64 * 8 * 4
    assert costs.epilogue.buffer_bytes == VOCABULARY * 4
    plan = Plan.of(
        Mesh(pp=2), global_batch=4, micro_batch=2, sequence=16, stages=((0, 1), (1, 2)), schedule="1f1b",
        precision="fp32",
    )  # fmt: skip
    stages = estimate(costs, plan, Cluster(2)).stages
    found = [next(t.size_bytes for t in stage.memory if t.name == "buffers of the model") for stage in stages]
    everywhere = costs.constants_bytes
    assert found == [everywhere + costs.prologue.buffer_bytes, everywhere + costs.epilogue.buffer_bytes]


def test_values_of_the_whole_batch_are_exchanged_over_dp() -> None:
    """The mean over samples is summed forward, its gradient is whole on each rank; the loss leaves as a summand."""
    costs = coupled()
    moved = [t for block in (costs.prologue, *costs.classes.values(), costs.epilogue) for t in block.data_transfers]
    assert ("all_reduce", "forward", 8 * 4) in [(t.collective, t.phase, int(t.size_bytes)) for t in moved]
    plan = Plan.of(Mesh(dp=2), global_batch=4, micro_batch=2, sequence=16, stages=((0, 2),), precision="fp32")
    free = replace(costs, epilogue=replace(costs.epilogue, data_transfers=()))
    cluster = Cluster(2)
    more_s = estimate(costs, plan, cluster).step_time_s - estimate(free, plan, cluster).step_time_s
    group = axis_group(plan.mesh, "dp", cluster.hardware.gpus_per_node)
    expected = sum(collective_time_s(t.collective, float(t.size_bytes), group, cluster.hardware) for t in moved)
    assert more_s == pytest.approx(expected) and expected > 0
