"""fp16 with a dynamic loss scale: one decision on all ranks, saved state, an end that names the parameter.

An overflow is forced by an inf in the gradient that one rank has, where no other rank sees it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.rules.spread import data_types
from autopar.runtime.data_parallel import local_part
from autopar.runtime.precision import LossScale
from autopar.runtime.trainer import Trainer
from tests.distributed.families import family
from tests.distributed.half import SCALE, assert_half, expected_losses
from tests.distributed.programs import VOCABULARY, Subject, compare, gpt, local_batch, subject, trainer_of, worst
from tests.harness import RankError, run_ranks

FP16 = torch.float16
PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2, "micro_batch": 3},
    "zero3": {"dp": 2, "micro_batch": 3, "zero": 3},
    "zero2-tp2-pp2": {"dp": 2, "tp": 2, "pp": 2, "micro_batch": 3, "zero": 2},
}
OVERFLOW = 2  # the step whose gradient is made inf


@dataclass(frozen=True)
class Run:
    """What a rank saw, step by step, and what it had in the end."""

    losses: list[float]
    scales: list[float]
    skipped: list[bool]
    weights: dict[str, Tensor]
    optimizer_steps: set[int]


def spoil(trainer: Trainer, when: Callable[[], bool], name: str | None = None) -> None:
    """After each backward for which `when()`: an inf in this rank's part of a gradient (of the first parameter)."""
    (replicas,) = trainer.data_parallel
    after_backward = replicas.after_backward

    def spoilt() -> None:
        after_backward()
        if when():
            held = [p for n, p in trainer.parameters.items() if name is None or trainer.names.original(n) == name]
            part = next(local_part(p.grad) for p in held if p.grad is not None and local_part(p.grad).numel())
            part.view(-1)[0] = math.inf

    replicas.after_backward = spoilt  # type: ignore[method-assign]


def train(trainer: Trainer, of: Subject, leave_out: int | None = None) -> Run:
    """All steps; of step `leave_out` the optimizer takes none and the scale is halved, by hand."""
    results = []
    for i, batch in enumerate(of.batches):
        if i == leave_out:
            trainer.loss_scale.update(True)
            continue
        results.append(trainer.step(local_batch(trainer, batch)))
    taken = {int(s["step"]) for n in trainer.parameters if "step" in (s := trainer.optimizer.states(n))}
    return Run(
        [r.loss for r in results],
        [r.loss_scale for r in results],
        [r.skipped for r in results],
        trainer.state_dict(),
        taken,
    )


@cache
def losses_with_a_step_skipped() -> tuple[list[float], float]:
    return expected_losses(gpt(FP16), [OVERFLOW])


@pytest.mark.parametrize(
    ("plan", "bad"),
    [
        pytest.param(plan, bad, marks=[] if i < 4 and (i + bad) % 2 == 0 else pytest.mark.slow, id=f"{plan}-{bad}")
        for i, plan in enumerate(PLANS)
        for bad in (0, -1)
    ],
)
def test_n4_an_overflow_on_one_rank_is_skipped_by_all(plan: str, bad: int) -> None:
    """N4: equal scales afterwards, and the weights of a run that never saw the step, bit for bit."""
    model = gpt(FP16)
    chosen = model.plan(**PLANS[plan])
    source, world = model.source(chosen), chosen.mesh.world_size
    expected, allowed = losses_with_a_step_skipped()

    def on_rank(rank: int) -> tuple[Run, Run]:
        trainer = trainer_of(source, model.weights, loss_scale=LossScale(SCALE))
        spoil(trainer, lambda: rank == bad % world and trainer.steps == OVERFLOW)
        spoilt = train(trainer, model)
        other = trainer_of(source, model.weights, loss_scale=LossScale(SCALE))
        return spoilt, train(other, model, leave_out=OVERFLOW)

    for spoilt, left_out in run_ranks(world, on_rank, timeout=120):
        assert spoilt.skipped == [i == OVERFLOW for i in range(len(model.batches))]
        assert spoilt.scales == [SCALE, SCALE, SCALE, SCALE / 2, SCALE / 2]
        assert spoilt.weights.keys() == left_out.weights.keys()
        assert all(torch.equal(spoilt.weights[name], left_out.weights[name]) for name in spoilt.weights)
        assert worst([abs(a - b) / b for a, b in zip(spoilt.losses, expected, strict=True)]) <= allowed


def test_n4_an_overflow_in_one_replicas_backward_reaches_all() -> None:
    """The inf arises in forward and backward themselves, of one replica's samples; AdamW counts no step for it."""
    model = gpt(FP16)
    source = model.source(model.plan(dp=2, micro_batch=3, zero=1))
    source = source.replace('optimizer="SGD"', 'optimizer="AdamW"').replace("momentum", "weight_decay")

    def on_rank(rank: int) -> Run:
        trainer = trainer_of(source, model.weights, loss_scale=LossScale(SCALE))

        def huge(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return output * (1e6 if rank == 1 and trainer.steps == OVERFLOW else 1.0)

        next(iter(trainer.model.transformer.h.children())).register_forward_hook(huge)  # type: ignore[union-attr]
        return train(trainer, model)

    for run in run_ranks(2, on_rank):
        assert run.skipped == [i == OVERFLOW for i in range(len(model.batches))]
        assert run.optimizer_steps == {len(model.batches) - 1}
        assert all(w.isfinite().all() for w in run.weights.values())


@pytest.mark.parametrize("plan", ["zero3", "pp2"])
def test_the_scale_doubles_after_clean_steps(plan: str) -> None:
    model = gpt(FP16)
    chosen = model.plan(**PLANS[plan])
    source = model.source(chosen)

    def on_rank(rank: int) -> Run:
        return train(trainer_of(source, model.weights, loss_scale=LossScale(64.0, interval=2)), model)

    for run in run_ranks(2, on_rank):
        assert run.scales == [64, 64, 128, 128, 256] and not any(run.skipped)


# --------------------------------------------------------------------------------
# State


def test_n5_the_state_is_saved_and_not_advanced_by_the_load(tmp_path: Path) -> None:
    """N5: in fresh processes, under the plan that saved it and under another; then training goes on as without."""
    model = gpt(FP16)
    sources = {plan: model.source(model.plan(**PLANS[plan])) for plan in ("zero3", "pp2")}

    def saved(rank: int) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
        trainer = trainer_of(sources["zero3"], model.weights, loss_scale=LossScale(SCALE, interval=4))
        spoil(trainer, lambda: rank == 1 and trainer.steps == 1)
        for batch in model.batches[:3]:
            trainer.step(local_batch(trainer, batch))
        trainer.save(tmp_path)
        state = trainer.loss_scale.state()
        scales = [trainer.step(local_batch(trainer, batch)).loss_scale for batch in (*model.batches, *model.batches)]
        return state, scales, trainer.state_dict()

    def resumed(rank: int, plan: str) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor], int]:
        trainer = trainer_of(sources[plan], tmp_path, loss_scale=LossScale(interval=4))
        state, steps = trainer.loss_scale.state(), trainer.steps
        scales = [trainer.step(local_batch(trainer, batch)).loss_scale for batch in (*model.batches, *model.batches)]
        return state, scales, trainer.state_dict(), steps

    (state, scales, weights), *_ = run_ranks(2, saved)
    assert state == {"scale": SCALE / 2, "clean": 1, "skipped": 0}
    assert scales[:8] == [SCALE / 2] * 3 + [SCALE] * 4 + [2 * SCALE]
    for plan in sources:
        for found, again, after, steps in run_ranks(2, resumed, plan):
            assert (found, again, steps) == (state, scales, 3)
            if plan == "zero3":
                assert all(torch.equal(after[name], weights[name]) for name in after)


def test_n5_a_checkpoint_of_another_precision_starts_anew(tmp_path: Path) -> None:
    half, brain = gpt(FP16), gpt(torch.bfloat16)
    sources = [of.source(of.plan()) for of in (brain, half)]

    def on_rank(rank: int) -> tuple[float, int]:
        trainer = trainer_of(sources[0], brain.weights)
        trainer.step(local_batch(trainer, brain.batches[0]))
        trainer.save(tmp_path)
        resumed = trainer_of(sources[1], tmp_path)
        return resumed.loss_scale.scale, resumed.steps

    assert run_ranks(1, on_rank) == [(65536.0, 1)]


# --------------------------------------------------------------------------------
# The end


@pytest.mark.parametrize("plan", ["tp2", "pp2", "zero3"])
def test_n6_an_overflow_for_ever_ends_naming_the_parameter(plan: str) -> None:
    """N6: on every rank the same error, though one alone has the inf; none hangs."""
    model = gpt(FP16)
    chosen = model.plan(**PLANS[plan])
    source = model.source(chosen)
    # Of the last stage under pp2; under tp2 and ZeRO-3 in a part that rank 1 has.
    name = "transformer.h.3.mlp.c_proj.weight"

    def on_rank(rank: int) -> tuple[int, str]:
        trainer = trainer_of(source, model.weights, loss_scale=LossScale(8.0))
        spoil(trainer, lambda: rank == 1, name)
        with pytest.raises(OverflowError) as error:
            train(trainer, model)
        return trainer.loss_scale.skipped, str(error.value)

    first, second = run_ranks(2, on_rank)
    assert first == second
    skips, message = first
    assert skips == 4 and f"the gradient of {name} is still not finite" in message and "backward overflows" in message


class Masked(nn.Module):
    """Attention written out with a mask that is out of fp16's range, and samples that see nothing at all."""

    def __init__(self, amplification: float = 1.0) -> None:
        super().__init__()
        self.amplification = amplification
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.query = nn.Linear(32, 32)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids) * self.amplification
        hidden = (labels == -100).to(x.dtype)[:, None, :] * -1e9
        scores = (self.query(x) @ x.transpose(1, 2) + hidden).masked_fill((input_ids == 3)[:, None, :], -1e9)
        return F.cross_entropy(self.head(scores.softmax(-1) @ x).flatten(0, 1), labels.flatten())


def test_n6_masks_are_brought_into_range() -> None:
    """N6: in fp16 torch refuses to fill −1e9 in, and a product with it is −inf, whose rows are NaN."""
    model = subject(Masked(), FP16)
    source = model.source(model.plan(dp=2, micro_batch=3))

    def on_rank(rank: int) -> Run:
        return train(trainer_of(source, model.weights, loss_scale=LossScale(SCALE)), model)

    for run in run_ranks(2, on_rank):
        assert not any(run.skipped)
        assert worst([abs(a - b) / b for a, b in zip(run.losses, model.reference.losses, strict=True)]) < 2e-3


def test_n6_what_is_always_inf_ends_with_its_cause() -> None:
    model = subject(Masked(1e5), FP16)
    source = model.source(model.plan(dp=2, micro_batch=3))

    def on_rank(rank: int) -> None:
        train(trainer_of(source, model.weights, loss_scale=LossScale(2.0)), model)

    with pytest.raises(RankError, match=r"OverflowError.*embedding.weight.*loss is (nan|inf), so forward overflows"):
        run_ranks(2, on_rank)


# --------------------------------------------------------------------------------
# P15


class Faint(nn.Module):
    """A GPT whose loss is a million times smaller."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = 1e-6 * self.model(input_ids=input_ids, labels=labels).float()
        return loss


def test_p15_a_loss_of_1e_6_reaches_every_gradient_through_a_pipeline() -> None:
    """P15: the schedule owns backward, so the scale goes in with the loss. Without it gradients are zero."""
    model = subject(Faint(gpt(torch.float32).model), FP16)
    source = model.source(model.plan(pp=2))
    exact = model.reference.gradients[0]

    def on_rank(rank: int, scale: float) -> tuple[float, dict[str, Tensor]]:
        trainer = trainer_of(source, model.weights, loss_scale=LossScale(scale))
        loss = trainer.step(local_batch(trainer, model.batches[0])).loss
        return loss, trainer.gradients()

    def zeros(gradients: dict[str, Tensor]) -> float:
        wanted = {name: exact[name] != 0 for name in gradients}
        lost = sum(int((wanted[name] & (gradients[name] == 0)).sum()) for name in gradients)
        return lost / sum(int(w.sum()) for w in wanted.values())

    for loss, gradients in run_ranks(2, on_rank, 65536.0):
        assert loss == pytest.approx(model.reference.losses[0], rel=1e-2) and loss < 1e-5
        assert zeros(gradients) < 0.02
        assert compare(gradients, exact)[0] < 0.05
    assert all(zeros(gradients) > 0.5 for _, gradients in run_ranks(2, on_rank, 1.0))


@pytest.mark.slow
def test_t5s_guard_against_infs_couples_no_samples() -> None:
    """It clamps where any value of the batch is inf: here each element alone, so plans stay free."""
    t5 = family("t5", FP16)
    assert data_types(t5.program).coupling is None
    assert_half(t5, t5.plan(dp=2, micro_batch=3))
