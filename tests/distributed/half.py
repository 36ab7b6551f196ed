"""The contract in bf16 and fp16: the error against the original in fp32 is at most twice that of the original in the
same dtype with fp32 masters."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.plan.plan import Plan
from autopar.runtime.precision import LossScale
from tests.distributed.programs import OPTIMIZERS, Batch, Subject, compare, local_batch, trainer_of, worst
from tests.harness import run_ranks

# For fp16, of both sides. The original may return its loss in fp16, through which 65,536 cannot pass.
SCALE = 2.0**12


@dataclass(frozen=True)
class HalfRun:
    """The loss of each step, and the gradients of the first one by original name."""

    losses: list[float]
    gradients: dict[str, Tensor]


def assert_half(subject: Subject, plan: Plan) -> None:
    """The loss of each step, and the first gradients, on every rank."""
    source = subject.source(plan)
    exact = HalfRun(subject.reference.losses, subject.reference.gradients[0])
    allowed = allowed_errors(original_in(subject, subject.dtype), exact)

    def on_rank(rank: int) -> tuple[float, float]:
        trainer = trainer_of(source, subject.weights, loss_scale=LossScale(SCALE))
        losses: list[float] = []
        gradients: dict[str, Tensor] = {}
        for batch in subject.batches:
            result = trainer.step(local_batch(trainer, batch))
            assert not result.skipped
            losses.append(result.loss)
            gradients = gradients or trainer.gradients()
        return errors(HalfRun(losses, gradients), exact)

    for loss, gradient in run_ranks(plan.mesh.world_size, on_rank, timeout=120):
        assert loss <= allowed[0]
        assert gradient <= allowed[1]


def errors(run: HalfRun, exact: HalfRun) -> tuple[float, float]:
    """(worst error of a loss, worst error of a gradient); a stage has some of the gradients."""
    loss = worst([abs(a - b) / abs(b) for a, b in zip(run.losses, exact.losses, strict=True)])
    return loss, compare(run.gradients, exact.gradients)[0]


def allowed_errors(original: HalfRun, exact: HalfRun) -> tuple[float, float]:
    """What the contract allows, given the original's own errors."""
    loss, gradient = errors(original, exact)
    return max(2 * loss, 1e-3), max(2 * gradient, 1e-3)


def original_in(subject: Subject, dtype: torch.dtype, skipped: Collection[int] = ()) -> HalfRun:
    """The original in a dtype with fp32 masters; the optimizer takes no step for the batches in `skipped`."""
    masters = {name: p.detach().clone() for name, p in subject.model.named_parameters()}
    model = copy.deepcopy(subject.model)
    for parameter in model.parameters():  # not model.to(): buffers keep their dtype, as HF loads them
        parameter.data = parameter.data.to(dtype)
    chosen = OPTIMIZERS[subject.precision]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, chosen.name)(masters.values(), **chosen.kwargs)
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for step, batch in enumerate(subject.batches):
        loss, gradients = _loss_and_gradients(model, batch, dtype)
        losses.append(loss)
        first = first or gradients
        if step in skipped:
            continue
        for name in masters:
            masters[name].grad = gradients[name]
        optimizer.step()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(masters[name])
    return HalfRun(losses, first)


def _loss_and_gradients(model: nn.Module, batch: Batch, dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    scale = SCALE if dtype is torch.float16 else 1.0
    model.zero_grad()
    outputs = model(**{name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()})
    loss: Tensor = getattr(outputs, "loss", outputs)
    (loss.float() * scale).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    return loss.item(), {name: p.grad.float() / scale for name, p in model.named_parameters() if p.grad is not None}


def expected_losses(subject: Subject, skipped: Sequence[int]) -> tuple[list[float], float]:
    """The losses of the original in fp32 that skips these steps, and the error that the contract allows."""
    exact = original_in(subject, torch.float32, skipped)
    return exact.losses, allowed_errors(original_in(subject, subject.dtype, skipped), exact)[0]
