"""When gathers and reductions are issued, by a recorder: what the cost model's overlap (overlap.py) assumes.

Depth 1: as a unit begins to compute, the next one's gather is issued and no other's, forward and backward. A unit's
gradients are reduced before the backward of the unit before it begins.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.distributed.programs import Subject, gpt, llama, local_batch, trainer_of
from tests.distributed.recorder import Event, IssueOrder, sharded_groups
from tests.distributed.test_frozen import _subject as frozen
from tests.harness import run_ranks
from tests.zero_table import collective_counts

TIED = "transformer.wte.weight"  # read before and after the layers: whole as long as anything is


def record(made: Subject, plan: Any) -> list[tuple[list[Event], list[str]]]:
    """Of each rank, the events of its second step, and its units in the order of their first forward."""
    source, weights = made.source(plan), made.weights

    def on_rank(rank: int) -> tuple[list[Event], list[str]]:
        trainer = trainer_of(source, weights)
        batch = local_batch(trainer, made.batches[0])
        trainer.step(batch)
        with pytest.MonkeyPatch.context() as monkeypatch:
            recorder = IssueOrder(trainer.model, monkeypatch)
            with recorder:
                trainer.step(batch)
        assert len(sharded_groups(trainer.model)) == len(recorder._groups)
        return recorder.events, list(dict.fromkeys(e.unit for e in recorder.events if e.what == "forward"))

    results: list[tuple[list[Event], list[str]]] = run_ranks(plan.mesh.world_size, on_rank, timeout=180)
    return results


def check_prefetch(events: list[Event], order: list[str]) -> None:
    """Beside the unit that computes, the next one is held, and none but it."""
    inner = [unit for unit in order if unit != TIED]
    following = {"forward": dict(pairwise(inner)), "backward": dict(pairwise(reversed(inner)))}
    seen = Counter[tuple[str, str]]()
    for event in events:
        if event.what in following and event.unit != TIED:
            after = following[event.what].get(event.unit)
            assert event.held - {TIED} == {event.unit, *([after] if after else [])}, event
            seen[event.what, event.unit] += 1
    # An embedding's backward reads no parameter.
    assert {unit for what, unit in seen if what == "forward"} == set(inner)
    assert {unit for what, unit in seen if what == "backward"} >= set(inner[1:])


def check_reductions(events: list[Event], order: list[str], micro_batches: int) -> None:
    """A reduction of a unit comes before the backward of the unit before it in the same micro-batch."""
    inner = [unit for unit in order if unit != TIED]
    places = {unit: [i for i, e in enumerate(events) if e.what == "reduce" and e.unit == unit] for unit in inner}
    assert {len(found) for found in places.values()} == {micro_batches}
    for before, unit in pairwise(inner):
        # Runs of backward ops of the unit before; the last ones belong to the last micro-batches.
        starts = [
            i
            for i, (last, event) in enumerate(pairwise(events), 1)
            if event.what == "backward" and event.unit == before and (last.what, last.unit) != ("backward", before)
        ]
        if starts:
            for reduce in places[unit]:
                nearest = min((start for start in starts if start > reduce), default=None)
                assert nearest is not None, f"{unit} is reduced after the backward of {before}"


CASES = [
    pytest.param(llama, 3, {}, id="llama-zero3"),
    pytest.param(gpt, 3, {"recompute": "all"}, id="gpt-zero3-recompute"),
    pytest.param(llama, 3, {"pp": 2}, id="llama-zero3-pp2"),
    pytest.param(llama, 3, {"tp": 2}, id="llama-zero3-tp2", marks=pytest.mark.slow),
    pytest.param(llama, 3, {"dp": 4, "hsdp": 2, "micro_batch": 1}, id="llama-zero3-hsdp", marks=pytest.mark.slow),
    pytest.param(llama, 3, {"offload": True}, id="llama-zero3-offload", marks=pytest.mark.slow),
    pytest.param(gpt, 3, {"pp": 2, "recompute": "all"}, id="gpt-zero3-pp2-recompute", marks=pytest.mark.slow),
    pytest.param(llama, 2, {}, id="llama-zero2"),
    pytest.param(gpt, 1, {}, id="gpt-zero1", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "zero", "choices"), CASES)
def test_gathers_and_reductions_are_issued_as_the_cost_model_assumes(
    model: Any, zero: int, choices: dict[str, Any]
) -> None:
    made = model(torch.float64)
    plan = made.plan(**{"dp": 2, "micro_batch": 2, **choices}, zero=zero)
    for events, order in record(made, plan):
        count = Counter(event.what for event in events)
        expected = collective_counts(zero, plan.accumulation, len(order))
        assert (count["gather"], count["reduce"]) == (expected.all_gather, expected.reduce_scatter)
        check_reductions(events, order, 1 if zero == 1 else plan.accumulation)
        if zero == 3:
            check_prefetch(events, order)


def test_frozen_layers_are_not_gathered_for_a_backward_that_they_have_not() -> None:
    """Embedding and two of four layers are frozen: a gather for the forward only."""
    made = frozen("layers")
    plan = made.plan(dp=2, micro_batch=3, zero=3)
    for events, order in record(made, plan):
        gathers = Counter(event.unit for event in events if event.what == "gather")
        assert [gathers[unit] // plan.accumulation for unit in order] == [1, 1, 1, 2, 2, 2]


def test_z11_embedding_and_head_are_buckets_of_their_own() -> None:
    made = llama(torch.float64)
    source, weights = made.source(made.plan(dp=2, micro_batch=2, zero=3)), made.weights

    def on_rank(rank: int) -> list[list[str]]:
        trainer = trainer_of(source, weights)
        trainer.step(local_batch(trainer, made.batches[0]))
        return [[p._param_fqn or "" for p in group.fsdp_params] for group in sharded_groups(trainer.model)]

    for groups in run_ranks(2, on_rank, timeout=120):
        assert ["model.embed_tokens.weight"] in groups
        assert ["model.norm.weight", "lm_head.weight"] in groups
        assert len(groups) == 4 + 2
