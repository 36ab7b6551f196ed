"""Running the micro-batches of one step: a loop, or a pipeline schedule of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining._backward import (
    stage_backward_weight,  # private: the public one keeps no graph
)

from .data_parallel import DataParallel
from .mesh import Mesh
from .precision import LossScale

Batch = Mapping[str, Tensor]
Run = Callable[[Batch], Tensor]  # a step's local batch → this rank's share of the scaled loss; leaves gradients
_PREFIX = "input_"  # a model's own input may be called `target`, as an argument of torch's schedules is
SINGLE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI_STAGE = {"interleaved": ScheduleInterleaved1F1B, "zero-bubble": ScheduleInterleavedZeroBubble}


def make_run(models: Sequence[nn.Module], data_parallel: Sequence[DataParallel], mesh: Mesh, scale: LossScale) -> Run:
    """Forward and backward of every micro-batch of a step, through the models of this rank's stages.

    The share of the loss is zero on every rank but that of the last stage.
    """
    if mesh.settings.pp == 1:
        return lambda batch: _accumulate(models[0], data_parallel[0], batch, mesh.settings.accumulation, scale)
    return _pipeline(models, data_parallel, mesh, scale)


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


def _pipeline(models: Sequence[nn.Module], data_parallel: Sequence[DataParallel], mesh: Mesh, scale: LossScale) -> Run:
    settings = mesh.settings
    stages: list[Any] = [_stage(*parts, mesh) for parts in zip(mesh.stages, models, data_parallel, strict=True)]
    # The last stage's output is the loss already; gradients are summed, not averaged over micro-batches.
    options: dict[str, Any] = {"loss_fn": lambda loss, _: scale.scaled(loss), "scale_grads": False}
    schedule: Any
    if settings.schedule in SINGLE_STAGE:
        schedule = SINGLE_STAGE[settings.schedule](stages[0], settings.accumulation, **options)
    else:
        schedule = MULTI_STAGE[settings.schedule](stages, settings.accumulation, **options)

    def run(batch: Batch) -> Tensor:
        losses: list[Tensor] = []
        unused_target = torch.empty(settings.accumulation)
        inputs: dict[str, Any] = {f"{_PREFIX}{name}": x for name, x in batch.items()}
        schedule.step(target=unused_target, losses=losses, return_outputs=False, **inputs)
        zero = torch.zeros((), device=mesh.device)
        return torch.stack([loss.detach() for loss in losses]).sum() if stages[-1].is_last else zero

    return run


def _stage(index: int, model: nn.Module, data_parallel: DataParallel, mesh: Mesh) -> _Stage:
    count = len(mesh.settings.stages)
    sent = _examples(model, index, mesh) if index < count - 1 else None
    stage = _Stage(
        _Submodule(model, index, sent, mesh),
        index,
        count,
        mesh.device,
        input_args=_examples(model, index - 1, mesh) if index > 0 else (),
        output_args=torch.empty((), device="meta") if sent is None else sent,
        group=mesh.group("pp"),
    )
    stage.data_parallel, stage.splits_backward = data_parallel, mesh.settings.schedule == "zero-bubble"
    return stage


class _Stage(PipelineStage):
    """torch's stage switches gradient sync and resharding off for every backward, which makes ZeRO-2 and 3
    keep what they should free; here each backward does what the ZeRO stage says.

    splits_backward: input gradients and weight gradients are computed by two backwards (zero-bubble). No hook of
    fully_shard sees the second: gradients are taken over after each, and reduced after a step's last one.
    """

    data_parallel: DataParallel
    splits_backward: bool

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        self.data_parallel.before_backward(last_backward and not self.splits_backward)
        if backward_type == "weight":
            # As super's, but the graph is kept (its nodes go with the groups): groups may share a part of it, where
            # parameters meet before they meet what was received.
            stage_backward_weight(self.submod.parameters(), bwd_kwargs["param_groups"], retain_graph=True)
            result: tuple[Any, Any] = (), None
        else:
            result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if self.splits_backward and backward_type != "input":
            self.data_parallel.after_weight_gradients(last_backward)
        return result[0], _disjoint(result[1])


def _disjoint(groups: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The parameter groups of a backward that computes weight gradients alone, each parameter in one of them.

    torch's `get_param_groups` leaves a group behind that it has merged into another where parameters meet at
    several nodes: their gradients would count twice.
    """
    if groups is None:
        return None
    inside = [any(a is not b and a["params"] < b["params"] for b in groups) for a in groups]
    kept = [group for group, merged in zip(groups, inside, strict=True) if not merged]
    if sum(len(group["params"]) for group in kept) != len(set().union(*(group["params"] for group in kept))):
        raise RuntimeError("zero-bubble: torch has a parameter in two groups: use schedule='interleaved' or '1f1b'")
    return kept


class _Submodule(nn.Module):
    """The model, with a check of what it sends on: it must be what the next stage has planned to receive.

    It also hides from PipelineStage that the model is an FSDPModule: it would set the model's flags itself.
    """

    def __init__(self, model: nn.Module, stage: int, sent: Sequence[Tensor] | None, mesh: Mesh) -> None:
        super().__init__()
        self.model, self._sent, self._boundary, self._checked = model, sent, _Boundary(stage, mesh), False

    def forward(self, *received: Tensor, **inputs: Tensor) -> Any:
        fault = self._boundary.received_fault() if received and not self._checked else ""
        batch = {name.removeprefix(_PREFIX): x for name, x in inputs.items()}
        received = tuple(_contiguous(x)[0] for x in received)
        result: Any = None if fault else self.model(*received, **batch)
        if self._sent is not None and not fault:
            fault = self._boundary.fault(result, self._sent)
        if fault:
            if self._sent is not None and not self._checked:
                self._boundary.send_fault(fault, self._sent)
            raise ValueError(fault)
        self._checked = True
        result = _contiguous(*result) if isinstance(result, tuple) else _contiguous(result)
        return result[0] if self._sent is None else result


class _Contiguous(torch.autograd.Function):
    """Values, and their gradients, laid out as they are sent: a permuted tensor cannot be.

    All values of a stage at once, and not as views: a backward that is split finds the parameters of what depends on
    nothing received through the node that this has in common with the rest, and detaches results in place.
    """

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
        laid = [x.contiguous() for x in values]
        sent = tuple(x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride()) for x in laid)
        ctx.mark_non_differentiable(*(x for x in sent if not x.is_floating_point()))
        return sent

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.contiguous() for grad in grads)


def _contiguous(*values: Tensor) -> tuple[Tensor, ...]:
    return _Contiguous.apply(*values)  # type: ignore[no-untyped-call, no-any-return]


class _Boundary:
    """Tells the next stage, which waits to receive, that nothing of use will come: it raises too, and none hangs."""

    def __init__(self, stage: int, mesh: Mesh) -> None:
        self._mesh, self._stage = mesh, stage
        self._store = dist.distributed_c10d._get_default_store()  # private: there is no public way to it

    def fault(self, result: Any, sent: Sequence[Tensor]) -> str:
        """The difference between the values that a stage sends and what `between_stages` says; "" without one."""
        real = [(list(t.shape), t.dtype) for t in (result if isinstance(result, tuple) else (result,))]
        planned = [(list(t.shape), t.dtype) for t in sent]
        if real == planned:
            return ""
        return (
            f"stage {self._stage} sends {_text(real)}, but stage {self._stage + 1} was planned to receive "
            f"{_text(planned)}: model.py's between_stages and forward must agree"
        )

    def send_fault(self, fault: str, sent: Sequence[Tensor]) -> None:
        """Send zeros of the planned shapes to the next stage, which waits for them, and the reason."""
        group, following = self._mesh.group("pp"), self._stage + 1
        peer = dist.get_global_rank(group, following % self._mesh.size("pp"))
        self._store.set(f"boundary/{peer}/{following}", fault)
        blanks = [torch.zeros(t.shape, dtype=t.dtype, device=self._mesh.device) for t in sent]
        # As the schedule sends: a single send would be another channel under NCCL.
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, t, peer, group) for t in blanks]):
            work.wait()

    def received_fault(self) -> str:
        """The fault that the stage before has sent; "" where it has sent none."""
        key = f"boundary/{dist.get_rank()}/{self._stage}"
        if not self._store.check([key]):
            return ""
        fault = bytes(self._store.get(key)).decode()
        self._store.delete_key(key)  # another Trainer of this process is not to hear it
        return fault


def _text(tensors: Sequence[tuple[list[int], torch.dtype]]) -> str:
    return ", ".join(f"{shape} {str(dtype).removeprefix('torch.')}" for shape, dtype in tensors)


def _examples(model: nn.Module, stage: int, mesh: Mesh) -> tuple[Tensor, ...]:
    """The values that `stage` sends on, on the meta device: whose shapes torch would else run a forward to know."""
    between_stages: Any = model.between_stages
    sent: Sequence[tuple[Sequence[int], torch.dtype]]
    sent = between_stages(stage, mesh.settings.micro_batch, mesh.settings.sequence // mesh.settings.cp)
    # Without requires_grad no gradient would be sent back.
    return tuple(
        torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point) for shape, dtype in sent
    )
