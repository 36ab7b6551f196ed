"""What stages send each other and keep of a micro-batch, recorded on ranks, is what the cost model says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.cost_models.compute import stage_shape
from autopar.cost_models.stage_memory import stage_memory
from autopar.plan.plan import Plan
from autopar.runtime.memory import LiveStorage
from tests.distributed.families import family
from tests.distributed.programs import SEQUENCE, Subject, batches, gpt, local_batch, trainer_of
from tests.distributed.recorder import DataCollectives
from tests.distributed.test_recompute_counts import price_of
from tests.distributed.test_windows import mistral
from tests.harness import run_ranks

Sent = Counter[tuple[int, int]]  # (from, to) of the ranks of pp → bytes


def recorded(made: Subject, plan: Plan) -> Sent:
    """Of the second step."""
    source = made.source(plan)

    def on_rank(rank: int) -> dict[int, int]:
        trainer = trainer_of(source, made.weights)
        trainer.step(local_batch(trainer, made.batches[0]))  # in their first step torch's stages agree on how to begin
        with DataCollectives(trainer.mesh.group("pp")) as counts:
            trainer.step(local_batch(trainer, made.batches[1]))
        return dict(counts.sent_to)

    found = run_ranks(plan.mesh.pp, on_rank)
    return Counter({(rank, to): size for rank, sent in enumerate(found) for to, size in sent.items()})


def priced(made: Subject, plan: Plan) -> Sent:
    boundaries, pp = price_of(made, plan).boundaries, plan.mesh.pp
    sent: Sent = Counter()
    for stage, (_, stop) in enumerate(plan.pipeline.stages[:-1]):
        here, following = stage % pp, (stage + 1) % pp
        sent[here, following] += plan.accumulation * int(boundaries.values_bytes[stop])
        sent[following, here] += plan.accumulation * int(boundaries.gradients_bytes[stop])
    return sent


@pytest.mark.parametrize(
    ("name", "schedule", "v"), [("t5", "1f1b", 1), ("unet", "1f1b", 1), ("t5", "interleaved", 2), ("bert", "gpipe", 1)]
)
def test_the_bytes_that_cross_each_boundary_are_those_of_the_price(name: str, schedule: str, v: int) -> None:
    """pp 3: what is carried over several boundaries counts on each; a mask has no gradient."""
    made = family(name, torch.float32)
    plan = made.plan(pp=3, schedule=schedule, virtual_stages=v)
    assert recorded(made, plan) == priced(made, plan)


@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize("name", ["gpt", "windowed", "t5", "unet", "bert"])
def test_each_stage_keeps_what_the_ledger_says(name: str, recompute: str) -> None:
    """Storages alive after a stage's forward, beside what it has received, as the ledger has them.

    windowed: with a mask of rows and keys, which each stage makes once for its layers.
    """
    own = {"gpt": lambda: gpt(torch.float32), "windowed": lambda: mistral(5)}
    made: Subject = own[name]() if name in own else family(name, torch.float32)
    length = 64 if name == "windowed" else SEQUENCE
    plan = made.plan(pp=3, schedule="gpipe", recompute=recompute, sequence=length)
    source, batch = made.source(plan), made.batches[0] if length == SEQUENCE else batches(sequence=length)[0]
    micro = {name: x[: plan.batch.micro_batch] for name, x in batch.items()}

    def on_rank(rank: int) -> int:
        trainer = trainer_of(source, made.weights)
        trainer._count(micro)
        received = _example(trainer.model, rank - 1, plan)
        trainer.model(*received, **micro)  # what is made once is there
        with LiveStorage() as storage:
            storage.track([*trainer.model.parameters(), *trainer.model.buffers(), *received, *micro.values()])
            before = storage.live()
            sent = trainer.model(*received, **micro)
            kept: int = storage.live() - before
            del sent
        return kept

    kept, price = run_ranks(3, on_rank), price_of(made, plan)
    for found, (start, stop) in zip(kept, plan.pipeline.stages, strict=True):
        priced = stage_memory(price, stage_shape(price, start, stop, plan.activations.recompute), 1).saved_bytes
        assert found == pytest.approx(priced, rel=0.1)  # CPUs have no fused kernel for a bias with a gradient


def test_a_layer_that_is_recomputed_counts_what_it_reads() -> None:
    """And not the stage beside it, whether a plan says what is recomputed or the search has chosen it."""
    made = family("unet", torch.float32)
    plan = made.plan(pp=3, recompute="all")
    price = price_of(made, plan)
    for start, stop in plan.pipeline.stages:
        plain, planned = stage_shape(price, start, stop), stage_shape(price, start, stop, plan.activations.recompute)
        chosen = tuple((("layer", count),) if count else () for count in plain.counts)
        assert replace(plain, recomputed=chosen).kept_bytes == planned.kept_bytes <= plain.kept_bytes
        assert (planned.kept_bytes < plain.kept_bytes) == (start == 3)  # whose two inputs nothing keeps


def _example(model: Any, stage: int, plan: Plan) -> list[Tensor]:
    """Values that a stage could have received."""
    shapes = model.between_stages(stage, plan.batch.micro_batch, plan.batch.sequence) if stage >= 0 else ()
    return [
        torch.ones(shape, dtype=dtype, requires_grad=dtype.is_floating_point)
        if dtype.is_floating_point
        else torch.ones(shape, dtype=dtype)
        for shape, dtype in shapes
    ]
