"""Running the micro-batches of one step: a loop, or a pipeline schedule of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from .data_parallel import DataParallel
from .mesh import Mesh

Batch = Mapping[str, Tensor]
Run = Callable[[Batch], Tensor]  # a step's local batch → this rank's share of the loss; leaves gradients
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def make_run(model: nn.Module, data_parallel: DataParallel, mesh: Mesh) -> Run:
    """Forward and backward of every micro-batch of a step.

    The share of the loss is zero on every stage but the last.
    """
    if mesh.settings.pp == 1:
        return lambda batch: _accumulate(model, data_parallel, batch, mesh.settings.accumulation)
    return _pipeline(model, data_parallel, mesh)


def _accumulate(model: nn.Module, data_parallel: DataParallel, batch: Batch, micro_batches: int) -> Tensor:
    chunks = {name: x.chunk(micro_batches) for name, x in batch.items()}
    losses = []
    for i in range(micro_batches):
        loss: Tensor = model(**{name: parts[i] for name, parts in chunks.items()})
        data_parallel.before_backward(last=i == micro_batches - 1)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def _pipeline(model: nn.Module, data_parallel: DataParallel, mesh: Mesh) -> Run:
    settings, index = mesh.settings, mesh.rank("pp")
    stage = _Stage(
        _Submodule(model),
        index,
        settings.pp,
        mesh.device,
        input_args=_examples(model, index - 1, mesh) if index > 0 else (),
        output_args=_examples(model, index, mesh) if index < settings.pp - 1 else torch.empty((), device="meta"),
        group=mesh.group("pp"),
    )
    stage.data_parallel = data_parallel
    # The last stage's output is the loss already; gradients are summed, not averaged over micro-batches.
    schedule = SCHEDULES[settings.schedule](
        stage, settings.accumulation, loss_fn=lambda loss, _: loss, scale_grads=False
    )

    def run(batch: Batch) -> Tensor:
        losses: list[Tensor] = []
        unused_target = torch.empty(settings.accumulation)
        schedule.step(target=unused_target, losses=losses, return_outputs=False, **dict[str, Any](batch))
        zero = torch.zeros((), device=mesh.device)
        return torch.stack([loss.detach() for loss in losses]).sum() if stage.is_last else zero

    return run


class _Stage(PipelineStage):
    """torch's stage switches gradient sync and resharding off for every backward, which makes ZeRO-2 and 3
    keep what they should free; here each backward does what the ZeRO stage says."""

    data_parallel: DataParallel

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        self.data_parallel.before_backward(last_backward)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


class _Submodule(nn.Module):
    """Hides from PipelineStage that the model is an FSDPModule: it would set the model's flags itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *received: Tensor, **inputs: Tensor) -> Any:
        return self.model(*received, **inputs)


def _examples(model: nn.Module, stage: int, mesh: Mesh) -> tuple[Tensor, ...]:
    """What `stage` sends on, on the meta device: static shapes, as torch's inference would run a forward."""
    between_stages: Any = model.between_stages
    sent: Sequence[tuple[Sequence[int], torch.dtype]]
    sent = between_stages(stage, mesh.settings.micro_batch, mesh.settings.sequence)
    # Without requires_grad no gradient would be sent back.
    return tuple(
        torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point) for shape, dtype in sent
    )
