"""Running the micro-batches of one step: a loop, or a pipeline schedule of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from .data_parallel import DataParallel
from .mesh import Mesh
from .precision import LossScale

Batch = Mapping[str, Tensor]
Run = Callable[[Batch], Tensor]  # a step's local batch → this rank's share of the scaled loss; leaves gradients
_PREFIX = "input_"  # a model's own input may be called `target`, as an argument of torch's schedules is
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def make_run(model: nn.Module, data_parallel: DataParallel, mesh: Mesh, scale: LossScale) -> Run:
    """Forward and backward of every micro-batch of a step.

    The share of the loss is zero on every stage but the last.
    """
    if mesh.settings.pp == 1:
        return lambda batch: _accumulate(model, data_parallel, batch, mesh.settings.accumulation, scale)
    return _pipeline(model, data_parallel, mesh, scale)


def _accumulate(
    model: nn.Module, data_parallel: DataParallel, batch: Batch, micro_batches: int, scale: LossScale
) -> Tensor:
    chunks = {name: x.chunk(micro_batches) for name, x in batch.items()}
    losses = []
    for i in range(micro_batches):
        loss = scale.scaled(model(**{name: parts[i] for name, parts in chunks.items()}))
        data_parallel.before_backward(last=i == micro_batches - 1)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def _pipeline(model: nn.Module, data_parallel: DataParallel, mesh: Mesh, scale: LossScale) -> Run:
    settings, index = mesh.settings, mesh.rank("pp")
    sent = _examples(model, index, mesh) if index < settings.pp - 1 else None
    stage = _Stage(
        _Submodule(model, sent, mesh),
        index,
        settings.pp,
        mesh.device,
        input_args=_examples(model, index - 1, mesh) if index > 0 else (),
        output_args=torch.empty((), device="meta") if sent is None else sent,
        group=mesh.group("pp"),
    )
    stage.data_parallel = data_parallel
    # The last stage's output is the loss already; gradients are summed, not averaged over micro-batches.
    schedule = SCHEDULES[settings.schedule](
        stage, settings.accumulation, loss_fn=lambda loss, _: scale.scaled(loss), scale_grads=False
    )

    def run(batch: Batch) -> Tensor:
        losses: list[Tensor] = []
        unused_target = torch.empty(settings.accumulation)
        inputs: dict[str, Any] = {f"{_PREFIX}{name}": x for name, x in batch.items()}
        schedule.step(target=unused_target, losses=losses, return_outputs=False, **inputs)
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
    """The model, with a check of what it sends on: it must be what the next stage has planned to receive.

    It also hides from PipelineStage that the model is an FSDPModule: it would set the model's flags itself.
    """

    def __init__(self, model: nn.Module, sent: Sequence[Tensor] | None, mesh: Mesh) -> None:
        super().__init__()
        self.model, self._sent, self._boundary, self._checked = model, sent, _Boundary(mesh), False

    def forward(self, *received: Tensor, **inputs: Tensor) -> Any:
        fault = self._boundary.told() if received and not self._checked else ""
        own = {name.removeprefix(_PREFIX): x for name, x in inputs.items()}
        received = _contiguous(received)
        result = None if fault else self.model(*received, **own)
        if self._sent is not None and not fault:
            fault = self._boundary.fault(result, self._sent)
        if fault:
            if self._sent is not None and not self._checked:
                self._boundary.tell(fault, self._sent)
            raise ValueError(fault)
        self._checked = True
        return result if self._sent is None else _contiguous(result)


class _Contiguous(torch.autograd.Function):
    """The value, and its gradient, laid out as they are sent: a permuted tensor cannot be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.contiguous() if not x.is_contiguous() else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


class _Boundary:
    """Tells the next stage, which waits to receive, that nothing of use will come: it raises too, and none hangs."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._stage = mesh, mesh.rank("pp")
        self._store = dist.distributed_c10d._get_default_store()  # private: there is no public way to it

    def fault(self, result: Any, sent: Sequence[Tensor]) -> str:
        """How what a stage sends differs from what `between_stages` says; "" where it does not."""
        real = [(list(t.shape), t.dtype) for t in (result if isinstance(result, tuple) else (result,))]
        planned = [(list(t.shape), t.dtype) for t in sent]
        if real == planned:
            return ""
        return (
            f"stage {self._stage} sends {_text(real)}, but stage {self._stage + 1} was planned to receive "
            f"{_text(planned)}: model.py's between_stages and forward must agree"
        )

    def tell(self, fault: str, sent: Sequence[Tensor]) -> None:
        """Send what was planned, without meaning, and why."""
        group = self._mesh.group("pp")
        peer = dist.get_global_rank(group, self._stage + 1)
        self._store.set(f"boundary/{peer}", fault)
        blanks = [torch.zeros(t.shape, dtype=t.dtype, device=self._mesh.device) for t in sent]
        # As the schedule sends: a single send would be another channel under NCCL.
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, t, peer, group) for t in blanks]):
            work.wait()

    def told(self) -> str:
        key = f"boundary/{dist.get_rank()}"
        if not self._store.check([key]):
            return ""
        fault = bytes(self._store.get(key)).decode()
        self._store.delete_key(key)  # another Trainer of this process is not to hear it
        return fault


def _contiguous(values: Any) -> Any:
    """What a stage sends, ready to be sent."""
    if isinstance(values, Tensor):
        return _Contiguous.apply(values)  # type: ignore[no-untyped-call]
    return tuple(_contiguous(x) for x in values)


def _text(tensors: Sequence[tuple[list[int], torch.dtype]]) -> str:
    return ", ".join(f"{shape} {str(dtype).removeprefix('torch.')}" for shape, dtype in tensors)


def _examples(model: nn.Module, stage: int, mesh: Mesh) -> tuple[Tensor, ...]:
    """What `stage` sends on, on the meta device: static shapes, as torch's inference would run a forward."""
    between_stages: Any = model.between_stages
    sent: Sequence[tuple[Sequence[int], torch.dtype]]
    sent = between_stages(stage, mesh.settings.micro_batch, mesh.settings.sequence // mesh.settings.cp)
    # Without requires_grad no gradient would be sent back.
    return tuple(
        torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point) for shape, dtype in sent
    )
