"""HSDP: states shared out in groups, the groups being replicas: exact, counted, saved and resumed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.emit.project import save_tensors
from autopar.emit.source import load_source
from autopar.runtime.trainer import Trainer
from autopar.search.layouts import MEGATRON_SP
from tests.distributed.half import assert_half
from tests.distributed.programs import assert_parity, gpt, llama, local_batch, trainer_of
from tests.distributed.recorder import DataCollectives, sharded_groups
from tests.distributed.test_frozen import _subject as frozen
from tests.harness import run_ranks
from tests.zero_table import collective_counts

GROUPS: dict[str, Any] = {"dp": 4, "hsdp": 2}  # 2 × 2
MODELS = {"gpt": gpt, "llama": llama}  # tied embeddings, and not
MICRO_BATCHES = {1: 3, 3: 1}  # micro-batches of a rank → samples of each


# --------------------------------------------------------------------------------
# The contract


def case(model: str, zero: int, m: int, slow: bool = False, **more: Any) -> Any:
    name = "-".join([model, f"zero{zero}", f"m{m}", *(f"{key}{value}" for key, value in more.items())])
    return pytest.param(model, zero, m, more, id=name, marks=[pytest.mark.slow] if slow else [])


QUICK = [
    case("gpt", 1, 3),
    case("llama", 2, 3),
    case("gpt", 3, 3, recompute="all"),
    case("llama", 3, 1, tp=2),
    case("gpt", 2, 3, slow=True, tp=2),
    case("llama", 1, 1),
]
FULL = [
    case(model, zero, m, True, **more)
    for model in MODELS
    for zero in (1, 2, 3)
    for m in (1, 3)
    for more in ({}, {"tp": 2, "layout": MEGATRON_SP}, {"pp": 2})
    if m == 3 or "pp" not in more  # 1f1b wants two micro-batches
]


@pytest.mark.parametrize(
    ("model", "zero", "m", "more"), QUICK + [c for c in FULL if c.id not in {quick.id for quick in QUICK}]
)
def test_parity(model: str, zero: int, m: int, more: dict[str, Any]) -> None:
    made = MODELS[model](torch.float64)
    assert_parity(made, made.plan(**GROUPS, zero=zero, micro_batch=MICRO_BATCHES[m], **more))


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_bf16(zero: int) -> None:
    made = llama(torch.bfloat16)
    assert_half(made, made.plan(**GROUPS, zero=zero, micro_batch=1))


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_frozen_parameters_in_groups_and_offloaded(zero: int) -> None:
    """Weights in the middle of each layer: no gradient, and kept as they are."""
    made = frozen("some")
    assert_parity(made, made.plan(**GROUPS, zero=zero, micro_batch=1, offload=True))


# --------------------------------------------------------------------------------
# What runs in a group, and what between groups


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_gathers_stay_in_the_group_and_groups_reduce_once_a_step(zero: int) -> None:
    made = llama(torch.float64)
    source, weights = made.source(made.plan(**GROUPS, zero=zero, micro_batch=1)), made.weights

    def on_rank(rank: int) -> tuple[Counter[str], Counter[str], int]:
        trainer = trainer_of(source, weights)
        batch = local_batch(trainer, made.batches[0])
        within, between = (DataCollectives(trainer.mesh.root[dim].get_group()) for dim in ("shard", "replicate"))
        with within, between:
            trainer.step(batch)
        return within.counts, between.counts, len(sharded_groups(trainer.model))

    for within, between, units in run_ranks(4, on_rank, timeout=120):
        expected = collective_counts(zero, micro_batches=3, units=units, copies=2)
        assert within == {"gather": expected.all_gather, "scatter": expected.reduce_scatter}
        assert between == {"all_reduce": expected.all_reduce}


# --------------------------------------------------------------------------------
# Checkpoints


@pytest.mark.slow
def test_a_checkpoint_resumes_under_other_groups(tmp_path: Path) -> None:
    """Saved under 2 × 2 with ZeRO-3, resumed under tp2·dp2, saved there, resumed under 2 × 2 with ZeRO-1."""
    made = gpt(torch.float64)
    plans = [
        made.plan(**GROUPS, zero=3, micro_batch=1),
        made.plan(dp=2, tp=2, zero=2, micro_batch=3),
        made.plan(**GROUPS, zero=1, micro_batch=3),
    ]
    sources, weights = [made.source(plan) for plan in plans], made.weights
    save_tensors(tmp_path / "weights.pt", dict(made.model.named_buffers()))

    def train(rank: int, place: int) -> tuple[float, dict[str, Tensor]]:
        program = load_source(sources[place])
        program.__file__ = str(tmp_path / "model.py")
        trainer = Trainer(program, tmp_path / f"saved{place - 1}" if place else weights)
        result = trainer.step(local_batch(trainer, made.batches[place]))
        trainer.save(tmp_path / f"saved{place}")
        return result.loss, trainer.state_dict()

    for place in range(3):
        results = run_ranks(4, train, place, timeout=120)
        assert all(loss == pytest.approx(made.reference.losses[place], rel=1e-9) for loss, _ in results)
