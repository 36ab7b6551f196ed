"""Dropout (S7, R1): masks agree where a tensor is replicated, differ where ranks hold different parts of the work,
and recomputation draws the same ones again."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.emit.source import load_source
from autopar.plan.plan import Plan
from autopar.runtime import random
from autopar.runtime.trainer import Trainer
from autopar.search.layouts import MEGATRON, MEGATRON_SP
from tests.distributed.programs import batches, gpt, local_batch
from tests.harness import run_ranks

DROPOUT, LAYERS = 0.1, 2


def _train(plan: Plan) -> list[tuple[list[float], dict[str, Tensor], dict[str, Tensor]]]:
    """Losses, last gradients and weights of two steps, for each rank."""
    subject = gpt(torch.float64, LAYERS, DROPOUT)
    source = subject.source(plan)

    def on_rank(rank: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
        trainer = Trainer(load_source(source), subject.weights, seed=3)
        losses = [trainer.step(local_batch(trainer, batch)).loss for batch in batches(steps=2)]
        return losses, trainer.gradients(), trainer.state_dict()

    return run_ranks(plan.mesh.world_size, on_rank)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("options", "which"),
    [
        ({"dp": 2, "micro_batch": 3}, "all"),
        ({"dp": 2, "micro_batch": 3, "zero": 3}, "groups of 2"),
        ({"tp": 2}, "attention core, mlp"),
        ({"tp": 2, "layout": MEGATRON_SP}, "all"),
        ({"tp": 2, "layout": MEGATRON_SP}, "attention, activation"),
        ({"pp": 2, "micro_batch": 3}, "attention | all"),
        ({"dp": 2, "tp": 2, "micro_batch": 3, "zero": 3}, "all | attention core"),
    ],
    ids=["dp2", "zero3-groups", "tp2-regions", "tp2-sp", "tp2-sp-regions", "pp2", "zero3-tp2"],
)
def test_recompute_changes_no_bit(options: dict[str, Any], which: str) -> None:
    """R1: with recompute the loss, the gradients and the weights are bit for bit those without."""
    subject = gpt(torch.float64, LAYERS, DROPOUT)
    kept, again = (_train(subject.plan(**options, recompute=chosen)) for chosen in ((), which))
    for (losses, *tensors), (losses_again, *tensors_again) in zip(kept, again, strict=True):
        assert losses == losses_again
        for one, other in zip(tensors, tensors_again, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) for name in one)


# --------------------------------------------------------------------------------
# Masks

Masks = dict[str, list[Tensor]]  # "embedding", "attention", "residual" → one mask a use, in order


def _record(program: ModuleType, masks: Masks) -> None:
    """Make the dropout calls of an emitted program note what they drop."""

    def recorded_dropout(x: Tensor, *options: Any, **more: Any) -> Tensor:
        result: Tensor = random.dropout(x, *options, **more)
        masks["residual" if masks["embedding"] else "embedding"].append((result == 0) & (x != 0))
        return result

    def recorded_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        state = torch.get_rng_state()
        # With equal scores and v = 1 the output is the matrix of weights after dropout.
        ones = torch.eye(k.shape[2], dtype=v.dtype).expand(*v.shape[:2], -1, -1)
        weights = random.attention(q * 0, k * 0, ones, **options)
        masks["attention"].append(weights.tril() + weights.new_ones(weights.shape).triu(1) == 0)
        torch.set_rng_state(state)
        result: Tensor = random.attention(q, k, v, **options)
        return result

    vars(program).update(dropout=recorded_dropout, attention=recorded_attention)


def _masks(plan: Plan) -> list[list[Masks]]:
    """For each rank and micro-batch, what one step drops."""
    subject = gpt(torch.float64, LAYERS, DROPOUT)
    source = subject.source(plan)

    def on_rank(rank: int) -> list[Masks]:
        program = load_source(source)
        trainer = Trainer(program, subject.weights, seed=3)
        (batch,) = batches(steps=1)
        found: list[Masks] = []
        forward = trainer.model.forward

        def forward_of_a_micro_batch(*args: Any, **kwargs: Any) -> Any:
            first: list[Tensor] = [] if trainer.mesh.rank("pp") == 0 else [torch.empty(0)]
            found.append({"embedding": first, "attention": [], "residual": []})
            _record(program, found[-1])
            return forward(*args, **kwargs)

        trainer.model.forward = forward_of_a_micro_batch
        trainer.step(local_batch(trainer, batch))
        return found

    return run_ranks(plan.mesh.world_size, on_rank)


KINDS = ("embedding", "attention", "residual")


def _same(one: Masks, other: Masks) -> dict[str, bool]:
    """For each kind of dropout, whether all masks are the same; none of them may drop nothing or far too much."""
    equal = {}
    for kind in KINDS:
        pairs = list(zip(one[kind], other[kind], strict=True))
        assert all(0.02 < mask.double().mean() < 0.2 for pair in pairs for mask in pair)
        alike = [torch.equal(a, b) for a, b in pairs]
        assert all(alike) or not any(alike), kind
        equal[kind] = all(alike)
    return equal


def test_masks_differ_over_replicas_and_micro_batches() -> None:
    """S7 on dp: no replica repeats another's masks, no micro-batch those of the one before."""
    subject = gpt(torch.float64, LAYERS, DROPOUT)
    first, second = _masks(subject.plan(dp=2, micro_batch=3))
    assert [len(micro_batches) for micro_batches in (first, second)] == [2, 2]
    assert _same(first[0], second[0]) == dict.fromkeys(KINDS, False)
    assert _same(first[0], first[1]) == dict.fromkeys(KINDS, False)


def test_masks_of_layers_differ() -> None:
    subject = gpt(torch.float64, LAYERS, DROPOUT)
    ((masks, *_),) = _masks(subject.plan(micro_batch=12))
    assert [len(masks[kind]) for kind in KINDS] == [1, LAYERS, 2 * LAYERS]
    for kind in ("attention", "residual"):
        assert not any(torch.equal(masks[kind][0], other) for other in masks[kind][1:])


@pytest.mark.parametrize(
    ("layout", "replicated"), [(MEGATRON, {"embedding", "residual"}), (MEGATRON_SP, set())], ids=["megatron", "sp"]
)
def test_masks_over_tp_agree_where_the_activation_is_replicated(layout: Any, replicated: set[str]) -> None:
    """S7 on tp: head shards and sequence shards differ; what every rank holds is dropped alike."""
    subject = gpt(torch.float64, LAYERS, DROPOUT)
    first, second = _masks(subject.plan(tp=2, layout=layout))
    for one, other in zip(first, second, strict=True):
        assert _same(one, other) == {kind: kind in replicated for kind in KINDS}


def test_masks_differ_over_stages() -> None:
    """S7 on pp: stages draw from streams of their own."""
    subject = gpt(torch.float64, LAYERS, DROPOUT)
    first, last = _masks(subject.plan(pp=2))
    assert len(first) == len(last) == 3
    for one, other in zip(first, last, strict=True):
        for kind in ("attention", "residual"):
            assert not any(torch.equal(a, b) for a in one[kind] for b in other[kind])
