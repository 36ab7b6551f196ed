"""What a stage holds, and a rank with its stages: elements of parameters, bytes of activations, recompute chosen.

Activations are held for every micro-batch in flight; torch.distributed.pipelining keeps a receive buffer for
each micro-batch of a step, both ways (stage.py `_create_act_recv_info`, `_create_grad_recv_info`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.cost_models.block import BlockPrice, RecomputePrice
from autopar.cost_models.compute import ModelPrice, StageShape, stage_blocks
from autopar.cost_models.stage_context import StageContext
from autopar.plan.schedules import InFlight


@dataclass(frozen=True)
class StageMemory:
    """One stage: elements a rank holds before data sharding; bytes of one micro-batch, recompute chosen."""

    parameters: int
    root_parameters: int  # read before and after the layers (a tied embedding): gathered from the first to the last use
    # Gathered in this order: what precedes the layers, the largest ones (or groups recomputed as one), what follows.
    unit_parameters: tuple[int, ...]
    saved_bytes: float
    transient_bytes: float  # beside what is saved: workspace, one recomputed layer
    in_flight: int
    receives_bytes: float = 0.0  # a micro-batch, from both neighbours
    buffer_bytes: int = 0  # of the model: tables, constants
    logits_bytes: float = 0.0  # of what is saved of all micro-batches in flight
    logits_at_peak_bytes: float = 0.0  # of what is saved and transient, when most is
    loss_chunks: int = 1
    kept_bytes: float | None = None  # of all micro-batches in flight, where not each keeps `saved_bytes`

    @property
    def activation_bytes(self) -> float:
        return self.in_flight * self.saved_bytes if self.kept_bytes is None else self.kept_bytes


def stage_memory(price: ModelPrice, shape: StageShape, in_flight: int) -> StageMemory:
    """The stage's parameters and activation bytes.

    The peak is at the start of a backward pass: in the epilogue with its workspace, or in the first layer
    after it, when what the epilogue saved is free again.
    """
    blocks = stage_blocks(price, shape)
    inner = [item for item in blocks if item[0] is not price.prologue and item[0] is not price.epilogue]
    saved = shape.kept_bytes
    for block, count, choices in blocks:
        saved += count * block.saved_bytes - sum(n * (block.saved_bytes - choice.saved_bytes) for choice, n in choices)
    layer_peak = max(
        (recompute_bytes(block, [choice for choice, _ in choices]) for block, _, choices in inner), default=0.0
    )
    working = [price.prologue.working_bytes] if shape.first else []
    logits = logits_at_peak = 0.0
    if shape.last:
        working.append(price.epilogue.working_bytes)
        layer_peak -= price.epilogue.saved_bytes
        logits = price.epilogue.logits_bytes
        at_loss = price.epilogue.working_bytes >= layer_peak  # else this micro-batch's are free again
        own = price.epilogue.logits_peak_bytes if at_loss else 0.0
        logits_at_peak = (in_flight - 1) * logits + own
    ends = end_parameters(price, shape)
    largest = max(
        (block.parameters * max([1, *(choice.group for choice, _ in choices)]) for block, _, choices in inner),
        default=0,
    )
    return StageMemory(
        parameters=stage_parameters(price, shape),
        root_parameters=ends.shared,
        unit_parameters=(ends.first, *[largest] * min(2, sum(count for _, count, _ in inner)), ends.last),
        saved_bytes=saved,
        transient_bytes=max([0.0, layer_peak, *working]),
        in_flight=in_flight,
        receives_bytes=shape.receives_bytes,
        buffer_bytes=price.model.constants_bytes + sum(b.buffer_bytes * n for b, n, _ in blocks),
        logits_bytes=in_flight * logits,
        logits_at_peak_bytes=logits_at_peak,
        loss_chunks=price.loss_chunks,
    )


def rank_memory(
    stages: Sequence[StageMemory], waiting_bytes: Sequence[float], times: Sequence[InFlight]
) -> StageMemory:
    """The stages of a rank together, at the fullest of its `times`.

    waiting_bytes: of a micro-batch in each stage whose gradients of weights are still to come.
    """
    saved = [stage.saved_bytes for stage in stages]
    kept_bytes, fullest = max(
        (sum(n * size for n, size in zip(sum(time, ()), (*saved, *waiting_bytes), strict=True)), time) for time in times
    )
    return StageMemory(
        parameters=sum(stage.parameters for stage in stages),
        root_parameters=sum(stage.root_parameters for stage in stages),
        unit_parameters=max((stage.unit_parameters for stage in stages), key=lambda units: max(units, default=0)),
        saved_bytes=sum(saved),
        transient_bytes=max(stage.transient_bytes for stage in stages),
        in_flight=sum(fullest.activations),
        receives_bytes=sum(stage.receives_bytes for stage in stages),
        buffer_bytes=sum(stage.buffer_bytes for stage in stages),
        kept_bytes=kept_bytes,
        logits_bytes=sum(n * stage.logits_bytes for n, stage in zip(fullest.activations, stages, strict=True)),
        logits_at_peak_bytes=sum(
            (n - 1) * stage.logits_bytes + stage.logits_at_peak_bytes
            for n, stage in zip(fullest.activations, stages, strict=True)
            if n
        ),
        loss_chunks=stages[0].loss_chunks,
    )


def recompute_bytes(block: BlockPrice, choices: Iterable[RecomputePrice]) -> float:
    """What a layer needs in backward beside what was kept: workspace, and what recompute makes again at once."""
    return block.working_bytes + max((choice.live_bytes for choice in choices), default=0.0)


@dataclass(frozen=True)
class EndParameters:
    """Elements outside of layers on a stage: read before them, after them, and both before and after (tied)."""

    first: int
    last: int
    shared: int

    @property
    def total(self) -> int:
        return self.first + self.last + self.shared


def end_parameters(price: ModelPrice, shape: StageShape) -> EndParameters:
    """A tied parameter has an extra copy on every later stage that reads it too."""
    before, after, tied = price.prologue.parameters, price.epilogue.parameters, price.epilogue.tied_parameters
    if shape.first and shape.last:
        shared = min(tied, before)
        return EndParameters(before - shared, after, shared)
    return EndParameters(before if shape.first else 0, after + tied if shape.last else 0, 0)


def stage_parameters(price: ModelPrice, shape: StageShape) -> int:
    """Elements that a stage holds and updates, its own copies of those tied to an earlier stage's among them."""
    parameters = sum(block.parameters * n for block, n in zip(price.classes, shape.counts, strict=True))
    tied = sum(block.tied_parameters for block, n in zip(price.classes, shape.counts, strict=True) if n)
    return parameters + end_parameters(price, shape).total + (0 if shape.first else tied)


def memory_of(price: ModelPrice, shapes: Sequence[StageShape], rank: int, context: StageContext) -> StageMemory:
    """What the ledger needs of a rank, with the micro-batches that its schedule keeps in flight."""
    stages, waiting = [], []
    for shape in shapes:
        stages.append(stage_memory(price, shape, 1))
        # The first stage's whole backward comes later: nothing of it waits but what it has received.
        blocks = [] if shape.first else stage_blocks(price, shape)
        waiting.append(sum(count * block.waiting_bytes for block, count, _ in blocks))
    return rank_memory(stages, waiting, context.fullest_times(rank))
