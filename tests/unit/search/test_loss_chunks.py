"""How many slices the search computes a loss in, and what it says of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.compile.compiler import prepare
from autopar.cost_models.compute import price_model
from autopar.cost_models.describe import describe
from autopar.cost_models.hardware import GIB, Cluster
from autopar.cost_models.layer_costs import ModelCosts
from autopar.cost_models.step_time import estimate
from autopar.errors import InfeasibleError, PlanError
from autopar.ir.graph import B, S
from autopar.plan.plan import Plan
from autopar.runtime.choices import Mesh
from autopar.search.explain import explain, plan_table
from autopar.search.layouts import replicated
from autopar.search.pins import Pins
from autopar.search.search import SearchResult
from examples.gpt import GPTConfig, build
from tests.unit.search.requests import search

SEQUENCE, VOCABULARY, WIDTH = 1024, 50257, 128
CLUSTER = Cluster(1, "h100-sxm-80gb")
LOGITS = SEQUENCE * VOCABULARY  # of one sample


@cache
def costs(smoothing: float = 0.0) -> ModelCosts:
    ids = torch.zeros(2, 16, dtype=torch.long)
    model = build(GPTConfig(vocab_size=VOCABULARY, n_layer=2, n_head=4, d_model=WIDTH, block_size=SEQUENCE))
    program = prepare(Smoothed(model, smoothing) if smoothing else model, {"input_ids": ids, "labels": ids}, "bf16")
    return describe(program, replicated(program), {B: 1, S: SEQUENCE})


class Smoothed(nn.Module):
    def __init__(self, model: Any, smoothing: float) -> None:
        super().__init__()
        self.embedding, self.head, self.smoothing = model.transformer.wte, model.lm_head, smoothing

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embedding(input_ids)).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), label_smoothing=self.smoothing)


def found(budget_gib: float, **pins: Any) -> SearchResult:
    return search(
        [costs()], CLUSTER, global_batch=8, sequence=SEQUENCE, budget_bytes=budget_gib * GIB, pins=Pins(**pins)
    )


def term(result: SearchResult, name: str) -> float:
    return sum(t.size_bytes for t in result.chosen.estimate.stages[-1].memory if t.name.startswith(name))


def test_whole_logits_where_they_fit() -> None:
    result = found(80)
    assert result.chosen.plan.activations.loss_chunks == 1
    assert term(result, "logits") == result.chosen.plan.batch.micro_batch * LOGITS * 12


def test_as_few_slices_as_the_budget_asks_for() -> None:
    """Of 8 samples whole logits take 8 × 618 MB. Their slices are bf16 and fp32 at once, and nothing is kept."""
    result = found(2.5, micro_batch=8)
    chunks = result.chosen.plan.activations.loss_chunks
    assert chunks > 1 and term(result, "logits") == pytest.approx(8 * LOGITS * 6 / chunks)
    with pytest.raises(InfeasibleError, match=f"loss_chunks={chunks // 2}"):
        found(2.5, micro_batch=8, loss_chunks=chunks // 2)
    slower = result.chosen.estimate.step_time_s / found(80, micro_batch=8).chosen.estimate.step_time_s
    assert slower > 1


def test_table_and_ledger_say_so() -> None:
    result = found(2.5, micro_batch=8)
    chunks = result.chosen.plan.activations.loss_chunks
    assert f"#1: head and loss in {chunks} slices of the vocabulary" in plan_table(result, "GPT", 1)
    assert f"logits, 1/{chunks} at once" in explain(result)


def test_pins() -> None:
    assert found(80, loss_chunks=5).chosen.plan.activations.loss_chunks == 5
    assert found(80, forbid={"loss_chunks": [1, 2]}).chosen.plan.activations.loss_chunks == 4
    with pytest.raises(PlanError, match="loss_chunks=0: use a whole number of slices, 1 to 65,536"):
        Pins(loss_chunks=0)
    with pytest.raises(PlanError, match="loss_chunks=2: the loss is no plain sum .*; use loss_chunks=1"):
        search([costs(0.1)], CLUSTER, global_batch=8, sequence=SEQUENCE, pins=Pins(loss_chunks=2))


def test_what_does_not_fit_is_told_with_the_fewest_logits() -> None:
    with pytest.raises(InfeasibleError, match=r"loss_chunks 32\)"):
        found(0.95)


def test_backward_has_one_more_matmul_and_no_more_collectives() -> None:
    whole, chunked = costs().epilogue, costs().chunked
    assert chunked is not None
    head = next(op for op in whole.ops if op.kind == "matmul")
    fused = next(op for op in chunked.ops if op.kind == "matmul")
    assert fused.forward_flops == head.forward_flops
    assert fused.backward_flops * 2 == head.backward_flops * 3
    assert [t.phase for t in chunked.transfers] == [t.phase for t in whole.transfers]


def test_more_slices_cost_launches_and_reads_of_the_rows() -> None:
    (price,) = price_model(costs(), [8], SEQUENCE, CLUSTER.hardware, "bf16")
    times = [price.with_chunks(chunks).epilogue.work_s for chunks in (1, 2, 8, 64)]
    assert times == sorted(times) and len(set(times)) == len(times)
    peaks = [price.with_chunks(chunks).epilogue.logits_peak_bytes for chunks in (2, 8, 64)]
    assert peaks[0] / peaks[1] == pytest.approx(4) and peaks[1] / peaks[2] == pytest.approx(8)


@pytest.mark.parametrize(("schedule", "in_flight"), [("gpipe", 4), ("1f1b", 1)])
def test_every_micro_batch_in_flight_keeps_its_logits(schedule: str, in_flight: int) -> None:
    """M1: the last stage of GPipe holds those of all of them, of 1F1B one; in slices none are kept."""
    plan = Plan.of(
        Mesh(pp=2), global_batch=4, micro_batch=1, sequence=SEQUENCE, stages=((0, 1), (1, 2)), schedule=schedule
    )
    for chunks, expected in ((1, LOGITS * (4 * in_flight + 8)), (4, LOGITS * 6 / 4)):
        last = estimate(costs(), plan.changed(loss_chunks=chunks), Cluster(2, "h100-sxm-80gb")).stages[-1]
        assert sum(t.size_bytes for t in last.memory if t.name.startswith("logits")) == pytest.approx(expected)


def test_yaml(tmp_path: Any) -> None:
    plan = Plan.of(Mesh(), 8, 8, SEQUENCE, ((0, 2),), loss_chunks=4)
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml").activations.loss_chunks == 4
    data: Mapping[str, Any] = plan.to_dict()
    assert (
        Plan.from_dict({key: value for key, value in data.items() if key != "loss_chunks"}).activations.loss_chunks == 1
    )
    (tmp_path / "plan.yaml").write_text((tmp_path / "plan.yaml").read_text().replace("chunks: 4", "chunks: many"))
    with pytest.raises(PlanError, match="loss_chunks: 'many' is not a whole number of slices"):
        Plan.load(tmp_path / "plan.yaml")
