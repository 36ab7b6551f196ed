"""Known traps of such systems (FAULTS.md), each by the program that would fall into it, against one process."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.emit.source import load_source
from autopar.runtime.trainer import Trainer
from autopar.search.layouts import MEGATRON_SP
from tests import models
from tests.distributed.programs import (
    VOCABULARY,
    Batch,
    Subject,
    assert_parity,
    batches,
    gpt,
    local_batch,
    parity,
    subject,
    trainer_of,
)
from tests.harness import run_ranks

FP64 = torch.float64


def _step(trainer: Trainer, batch: Batch) -> float:
    return trainer.step(local_batch(trainer, batch)).loss


# --------------------------------------------------------------------------------
# Pipeline


def test_p1_tied_copies_on_two_stages_stay_equal() -> None:
    """P1: the embedding and its head, on two stages, are equal bit for bit after 5 AdamW steps."""
    model = gpt(FP64)
    source = model.source(model.plan(pp=2))

    def copy_of_the_embedding(rank: int) -> tuple[Tensor, Tensor]:
        trainer = trainer_of(source, model.weights)
        before = trainer.state_dict()["transformer.wte.weight"].clone()
        for batch in batches():
            _step(trainer, batch)
        return before, trainer.state_dict()["transformer.wte.weight"]

    (before, first), (_, last) = run_ranks(2, copy_of_the_embedding)
    assert torch.equal(first, last)
    assert not torch.equal(before, first)


@pytest.mark.parametrize(("layers", "pp"), [(7, 2), (5, 3)])
def test_p3_layers_that_the_stages_do_not_divide(layers: int, pp: int) -> None:
    """P3: every layer is in exactly one stage; the union of the parameters is the model."""
    model = gpt(FP64, layers)
    plan = model.plan(pp=pp)
    assert [stop - start for start, stop in plan.pipeline.stages] == {7: [4, 3], 5: [2, 2, 1]}[layers]
    source = model.source(plan)
    stages = run_ranks(pp, lambda rank: set(trainer_of(source, model.weights).state_dict()))
    assert set().union(*stages) == {name for name, _ in model.model.named_parameters()}
    assert sum(map(len, stages)) == len(set().union(*stages)) + 1  # the embedding, tied
    assert_parity(model, plan)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batch", [6, 3, 1])
def test_p4_gradients_are_scaled_once_whatever_the_micro_batches(schedule: str, micro_batch: int) -> None:
    """P4: 2, 4 or 12 micro-batches through a pipeline, a mean loss."""
    model = gpt(FP64, 2)
    assert_parity(model, model.plan(pp=2, schedule=schedule, micro_batch=micro_batch))


def test_p14_every_rank_returns_the_same_loss() -> None:
    """P14: also those that are not on the last stage, bit for bit."""
    model = gpt(FP64, 2)
    source = model.source(model.plan(pp=2, dp=2, micro_batch=3))
    losses = run_ranks(4, lambda rank: [_step(trainer_of(source, model.weights), batch) for batch in batches(steps=2)])
    assert all(own == losses[0] for own in losses)
    assert losses[0] == pytest.approx([model.reference_on([batch]).losses[0] for batch in batches(steps=2)], rel=1e-12)


# --------------------------------------------------------------------------------
# ZeRO


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_z5_sharded_gradients_in_a_pipeline(zero: int, schedule: str) -> None:
    """Z5: ZeRO-2 and 3, 2 stages, 4 micro-batches, recompute."""
    model = gpt(FP64, 2)
    plan = model.plan(pp=2, dp=2, zero=zero, schedule=schedule, recompute="all", micro_batch=1, global_batch=8)
    assert plan.accumulation == 4
    assert_parity(model, plan, batches(samples=8))


@pytest.mark.parametrize("options", [{}, {"tp": 2}], ids=["dp2", "dp2-tp2"])
def test_z6_tied_weights_under_sharded_parameters(options: dict[str, Any], tmp_path: Path) -> None:
    """Z6: one parameter for embedding and head, before and after a save and a reload; 3 steps as one process."""
    model = gpt(FP64, 2)
    plan = model.plan(dp=2, zero=3, micro_batch=3, **options)
    source = model.source(plan)

    def reload(rank: int) -> bool:
        trainer = trainer_of(source, model.weights)
        for batch in batches(steps=3):
            _step(trainer, batch)
        trainer.save(tmp_path / "saved")
        resumed = Trainer(load_source(source), tmp_path / "saved")
        for t in (trainer, resumed):
            assert t.model.get_parameter("lm_head.weight") is t.model.get_parameter("transformer.wte.weight")
        before, after = trainer.state_dict(), resumed.state_dict()
        return before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)

    assert all(run_ranks(plan.mesh.world_size, reload))
    assert_parity(model, plan, batches(steps=3))


# --------------------------------------------------------------------------------
# Precision: what a token weighs


@pytest.mark.parametrize(
    "options",
    [{"micro_batch": 1}, {"micro_batch": 2}, {"dp": 2, "micro_batch": 1}, {"tp": 2, "micro_batch": 2}],
    ids=["accumulation2", "micro-batch2", "dp2", "tp2"],
)
def test_n1_every_token_weighs_the_same(options: dict[str, Any]) -> None:
    """N1: two samples, of 11 and 101 tokens that count."""
    data = batches(samples=2, sequence=104)
    for batch in data:
        batch["labels"] = batch["input_ids"].roll(-1, 1)
        batch["labels"][0, 11:] = -100
        batch["labels"][1, 101:] = -100
    model = _long_gpt()
    assert_parity(model, model.plan(**options, global_batch=2, sequence=104), data)


@cache
def _long_gpt() -> Subject:
    model, program = models.gpt(FP64, n_layer=2, d_model=32, block_size=128)
    return subject(model, FP64, program)


# --------------------------------------------------------------------------------
# Shards


def test_s5_a_row_parallel_bias_is_added_once() -> None:
    """S5: the biases after the reductions are 100; added twice they would show in every loss."""
    made, program = models.gpt(FP64, n_layer=2, d_model=32)
    model = subject(made, FP64, program)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("c_proj.bias"):
                parameter.fill_(100.0)
    plan = model.plan(tp=2)
    assert "row-parallel" in model.source(plan)
    assert_parity(model, plan)


def test_s6_gradients_of_norms_and_biases_on_sequence_shards_are_summed() -> None:
    """S6: on each rank they are the sum over all of the sequence, not this shard's part or a mean."""
    model = gpt(FP64, 2)
    source = model.source(model.plan(tp=2, layout=MEGATRON_SP))
    assert "summed(self.ln_1.weight)" in source
    (batch,) = batches(steps=1)
    expected = model.reference_on([batch]).gradients[0]

    def gradients(rank: int) -> dict[str, Tensor]:
        trainer = trainer_of(source, model.weights)
        _step(trainer, batch)
        return trainer.gradients()

    names = [name for name in expected if ".ln_" in name or name.endswith("c_proj.bias")]
    assert len(names) == 2 * 6 + 2
    for found in run_ranks(2, gradients):
        for name in names:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-12)


# --------------------------------------------------------------------------------
# Trace


class Scaled(nn.Module):
    """Every block multiplies by one buffer of the model, which no state_dict has, or by one parameter."""

    class Block(nn.Module):
        def __init__(self, d: int) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

        def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
            result: Tensor = x + self.down(F.gelu(self.up(self.norm(x)) * freqs.to(x.dtype)))
            return result

    def __init__(self, layers: int = 4, d: int = 16, learned: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, d)
        self.layers = nn.ModuleList(self.Block(d) for _ in range(layers))
        self.head = nn.Linear(d, VOCABULARY)
        self.freqs: Tensor
        freqs = torch.linspace(0.3, 3.1, 2 * d)
        if learned:
            self.freqs = nn.Parameter(freqs)
        else:
            self.register_buffer("freqs", freqs, persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, self.freqs)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("dtype", [FP64, torch.bfloat16], ids=["fp64", "bf16"])
def test_t3_a_buffer_that_is_not_saved(dtype: torch.dtype) -> None:
    """T3: on each stage its value and, in bf16, its own dtype; in no state_dict."""
    model = subject(Scaled(), dtype)
    plan = model.plan(pp=2)
    source = model.source(plan)

    def buffer(rank: int) -> tuple[dict[str, Tensor], set[str]]:
        trainer = trainer_of(source, model.weights)
        _step(trainer, batches(steps=1)[0])
        return dict(trainer.model.named_buffers()), {*trainer.state_dict(), *trainer.model.state_dict()}

    for buffers, names in run_ranks(2, buffer):
        (value,) = (value for name, value in buffers.items() if "freqs" in name)
        assert value.dtype is (FP64 if dtype is FP64 else torch.float32)
        assert torch.equal(value.double(), model.model.get_buffer("freqs").double())
        assert not any("freqs" in name for name in names)
    if dtype is FP64:
        assert_parity(model, plan)


@pytest.mark.parametrize(
    "options",
    [{"tp": 2, "layout": MEGATRON_SP}, {"dp": 2, "pp": 2, "zero": 3, "micro_batch": 3}],
    ids=["tp2-sp", "zero3-pp2"],
)
def test_a_parameter_that_every_layer_reads(options: dict[str, Any]) -> None:
    """Near T3 and T5: it belongs to the first stage, which sends it on, and gets the sum of all gradients."""
    model = subject(Scaled(learned=True), FP64)
    assert_parity(model, model.plan(**options))


class Repeated(nn.Module):
    """One block object three times, and a head that is the embedding."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, d)
        block = gpt(FP64, 2).model.get_submodule("transformer.h.0")
        self.blocks = nn.ModuleList([copy.deepcopy(block)] * 3)
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    "options",
    [
        {"tp": 2, "layout": MEGATRON_SP},
        {"pp": 3},
        {"dp": 2, "zero": 1, "micro_batch": 3},
        {"dp": 2, "zero": 3, "micro_batch": 3, "recompute": "all"},
        {"dp": 2, "pp": 2, "zero": 2, "micro_batch": 3},
    ],
    ids=["tp2-sp", "pp3", "zero1", "zero3-recompute", "zero2-pp2"],
)
def test_t5_one_block_used_three_times(options: dict[str, Any]) -> None:
    """T5: one set of parameters, whose gradient is the sum over its uses; on each stage that uses it, equal."""
    model = _repeated()
    errors = parity(model, model.plan(**options))
    assert errors.worst <= 1e-9, errors


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"pp": 2}, {"dp": 2, "zero": 3, "micro_batch": 3}], ids=str)
def test_t5_layers_that_share_only_some_parameters(options: dict[str, Any]) -> None:
    model = Scaled()
    model.layers[2].up = model.layers[0].up
    shared = subject(model, FP64)
    assert_parity(shared, shared.plan(**options))


@cache
def _repeated() -> Subject:
    return subject(Repeated(), FP64)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("options", [{}, {"tp": 2, "layout": MEGATRON_SP}, {"pp": 2}], ids=["one", "tp2-sp", "pp2"])
@pytest.mark.parametrize(("micro_batch", "sequence"), [(1, 16), (3, 16), (2, 24)])
def test_t11_sizes_are_not_those_of_the_trace(options: dict[str, Any], micro_batch: int, sequence: int) -> None:
    """T11: traced with one batch and sequence, run with others (1 among them)."""
    model = gpt(FP64, 2)
    plan = model.plan(**options, micro_batch=micro_batch, sequence=sequence, global_batch=6)
    assert_parity(model, plan, batches(steps=2, samples=6, sequence=sequence))


class Padded(nn.Module):
    """A table with a row that stands for padding and gets no gradient."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, d, padding_idx=3)
        self.blocks = nn.ModuleList([copy.deepcopy(gpt(FP64, 2).model.get_submodule("transformer.h.0"))])
        self.head = nn.Linear(d, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    "options", [{"dp": 2, "micro_batch": 3}, {"tp": 2, "layout": MEGATRON_SP}], ids=["dp2", "tp2-sp"]
)
def test_the_padding_row_of_an_embedding_gets_no_gradient(options: dict[str, Any]) -> None:
    """Its gradient, kept by mistake, would be seen by nothing but a comparison of gradients."""
    model = subject(Padded(), FP64)
    assert_parity(model, model.plan(**options))
    assert "padding_idx=3" in model.source(model.plan(**options))
