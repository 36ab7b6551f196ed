"""Faults that several stages a rank bring: order of sends (P6), uneven batches (P8); micro-batches in flight."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from autopar.plan.schedules import fullest_times
from autopar.runtime.pipeline import _Stage
from tests.distributed.programs import GLOBAL_BATCH, batches, gpt, local_batch, trainer_of
from tests.harness import run_ranks

KINDS = [("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)]


@pytest.mark.parametrize(("schedule", "v"), KINDS)
def test_a_rank_holds_what_the_cost_model_counts(schedule: str, v: int) -> None:
    """1F1B: min(m, pp − rank) on each stage. P6: with one rank far behind, nothing waits for ever."""
    subject, pp, m = gpt(torch.float64), 2, 6
    plan = subject.plan(pp=pp, schedule=schedule, virtual_stages=v, micro_batch=GLOBAL_BATCH // m)
    source = subject.source(plan)

    def on_rank(rank: int) -> int:
        most = 0

        def counted(stage: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal most
            time.sleep(0.05 * rank)
            alive[stage.stage_index] = alive.get(stage.stage_index, 0) + 1
            most = max(most, sum(alive.values()))
            return forward(stage, *args, **kwargs)

        def freed(stage: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
            result = backward(stage, kind, *args, **kwargs)
            # Gradients of the first stage's weights come as one with those of its inputs, when they come.
            alive[stage.stage_index] -= kind != "input"
            return result

        alive: dict[int, int] = {}
        forward, backward = _Stage.forward_one_chunk, _Stage.backward_maybe_with_nosync
        _Stage.forward_one_chunk, _Stage.backward_maybe_with_nosync = counted, freed  # type: ignore[method-assign, assignment]
        trainer = trainer_of(source, subject.weights)
        trainer.step(local_batch(trainer, batches(1)[0]))
        return most

    found = run_ranks(pp, on_rank)
    assert found == [max(sum(t.activations) for t in fullest_times(schedule, rank, pp, m, v)) for rank in range(pp)]
    assert schedule != "1f1b" or found == [min(m, pp - rank) for rank in range(pp)]


def test_p8_a_short_batch_is_refused_on_all_ranks_at_the_same_step() -> None:
    subject = gpt(torch.float64)
    source = subject.source(subject.plan(pp=2, schedule="interleaved", virtual_stages=2, micro_batch=6))

    def on_rank(rank: int) -> str:
        trainer = trainer_of(source, subject.weights)
        whole = batches(1)[0]
        trainer.step(whole)
        try:
            trainer.step({name: x[:10] for name, x in whole.items()})
        except ValueError as error:
            return f"step {trainer.steps}: {error}"
        return ""

    said = run_ranks(2, on_rank)
    assert said[0] == said[1] and said[0].startswith("step 1: the batch is input_ids [10, 16]")
