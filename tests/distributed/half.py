"""The contract in bf16: the error against the original in fp32 is at most twice that of the original in bf16."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from autopar.plan import Plan
from tests.distributed.programs import STEPS, Batch, Subject, compare, local_batch, trainer_of, worst
from tests.harness import run_ranks


def assert_bf16(subject: Subject, plan: Plan) -> None:
    """The loss of each step, and the first gradients, on every rank."""
    source = subject.source(plan)
    exact = subject.reference
    half = _bf16_run(subject, subject.batches)

    def errors(losses: list[float], gradients: dict[str, torch.Tensor]) -> tuple[float, float]:
        loss = worst([abs(a - b) / abs(b) for a, b in zip(losses, exact.losses, strict=True)])
        return loss, compare(gradients, exact.gradients[0])[0]

    def on_rank(rank: int) -> tuple[float, float]:
        trainer = trainer_of(source, subject.weights)
        losses: list[float] = []
        gradients: dict[str, torch.Tensor] = {}
        for batch in subject.batches:
            losses.append(trainer.step(local_batch(trainer, batch)).loss)
            gradients = gradients or trainer.gradients()
        return errors(losses, gradients)

    allowed = [max(2 * error, 1e-3) for error in errors(*half)]
    for loss, gradient in run_ranks(plan.mesh.world_size, on_rank, timeout=120):
        assert loss <= allowed[0]
        assert gradient <= allowed[1]


def _bf16_run(subject: Subject, data: Sequence[Batch]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The original in bf16 with fp32 masters: the loss of each step and the first gradients."""
    masters = {name: p.detach().clone() for name, p in subject.model.named_parameters()}
    model = copy.deepcopy(subject.model)
    for parameter in model.parameters():  # not model.to(): buffers keep their dtype, as HF loads them
        parameter.data = parameter.data.to(torch.bfloat16)
    optimizer = torch.optim.SGD(masters.values(), lr=0.02, momentum=0.9)
    losses: list[float] = []
    first: dict[str, torch.Tensor] = {}
    for batch in data:
        model.zero_grad()
        inputs = {name: x.bfloat16() if x.is_floating_point() else x for name, x in batch.items()}
        outputs = model(**inputs)
        loss: torch.Tensor = getattr(outputs, "loss", outputs)
        loss.backward()
        losses.append(loss.item())
        gradients = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
        first = first or gradients
        for name in masters:
            masters[name].grad = gradients[name]
        optimizer.step()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(masters[name])
    assert len(losses) == STEPS
    return losses, first
