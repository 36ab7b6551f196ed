"""The memory ledger of one rank: what is resident, term by term, at the peak of a step.

The states follow DESIGN §6's table, a function of (ZeRO stage, micro-batches m, precision). P elements a rank,
D data ranks, c bytes of the compute dtype, w of masters (bf16, fp16: 2, 4; fp32: 4, 4; fp64: 8, 8), g of gradients:
those of the reduction (w, or c if so pinned) while whole, w as shards and once reduced:

    ZeRO  compute copy               master w, states  gradients                   gathered for a while
    0     half cP (else the master)  whole             whole                       –
    1     cP                         1/D               whole if m > 1, else 1/D    –
    2     cP                         1/D               1/D                         –
    3     –                          1/D               1/D                         unit, next unit, shared ends

In whole precision (fp32, fp64) one data rank has plain parameters, as with ZeRO 0, whatever the ZeRO stage.
With hsdp D is the ranks of a group. With offload masters, states and reduced gradients lie on the host (`host_ledger`),
but those that wait for the other groups of hsdp; a unit's part passes through the device on its way.

Activations are held for every micro-batch in flight; torch.distributed.pipelining keeps a receive buffer for
each micro-batch of a step, both ways (stage.py `_create_act_recv_info`, `_create_grad_recv_info`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from autopar.cost_models.block import AgainPrice, BlockPrice
from autopar.cost_models.compute import ModelPrice, StageShape, stage_blocks
from autopar.cost_models.hardware import Hardware
from autopar.errors import PlanError
from autopar.plan import MASTERS, Optimizer
from autopar.schedules import Held

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
BUCKET_BYTES = 25 * 2**20  # of the all-reduce outside fully_shard
# torch's allocator of pinned memory rounds each tensor up to a power of two: 1/ln 2 on average over sizes.
_PINNED_ROUNDING = 0.44


@dataclass(frozen=True)
class MemoryTerm:
    """One line of the ledger."""

    name: str
    size_bytes: float


@dataclass(frozen=True)
class States:
    """Everything the size of parameters, gradients and optimizer states depends on."""

    zero: int
    micro_batches: int
    shards: int  # ranks that share out one copy: of the data axis (dp × cp), or of a group of hsdp
    precision: str
    optimizer: Optimizer = Optimizer()
    reduce_dtype: str | None = None  # of gradients; None: of the masters
    copies: int = 1  # groups of hsdp
    offload: bool = False

    @property
    def compute_bytes(self) -> int:
        return BYTES[self.precision]

    @property
    def master_bytes(self) -> int:
        return BYTES[MASTERS[self.precision]]

    @property
    def reduce_bytes(self) -> int:
        """Of a gradient as replicas sum it, and as it is accumulated before."""
        return BYTES[self.reduce_dtype] if self.reduce_dtype else self.master_bytes

    @property
    def has_copy(self) -> bool:
        """The parameters computed with are another tensor than those the optimizer updates: those of fully_shard, which
        in whole precision leaves out ZeRO-0 and one data rank alone (autopar/runtime/data_parallel.py)."""
        alone = self.shards * self.copies == 1 and not self.offload
        return self.compute_bytes < self.master_bytes or self.zero > 0 and not alone

    @property
    def keeps_whole_gradients(self) -> bool:
        """Between micro-batches, unsharded."""
        return self.zero == 0 or (self.zero == 1 and self.micro_batches > 1)

    @property
    def waits_for_copies(self) -> bool:
        """Reduced gradients stay on the device between micro-batches, until the groups of hsdp add theirs."""
        return self.copies > 1 and self.zero >= 2 and self.micro_batches > 1

    @property
    def reduces_behind_backward(self) -> bool:
        """Reductions run while backward computes: not the buckets outside fully_shard, which follow it, nor where
        the host adds up what each micro-batch brings, for which backward waits (torch copies without a stream then).
        """
        on_host = self.offload and self.zero >= 2 and self.micro_batches > 1 and not self.waits_for_copies
        return self.has_copy and not on_host


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
    held_bytes: float | None = None  # of all micro-batches in flight, where not each keeps `saved_bytes`

    @property
    def activation_bytes(self) -> float:
        return self.in_flight * self.saved_bytes if self.held_bytes is None else self.held_bytes


def stage_memory(price: ModelPrice, shape: StageShape, in_flight: int) -> StageMemory:
    """The stage's parameters and activation bytes.

    The peak is at the start of a backward pass: in the epilogue with its workspace, or in the first layer
    after it, when what the epilogue saved is free again.
    """
    blocks = stage_blocks(price, shape)
    inner = [item for item in blocks if item[0] is not price.prologue and item[0] is not price.epilogue]
    saved = shape.held_bytes
    for block, count, again in blocks:
        saved += count * block.saved_bytes - sum(n * (block.saved_bytes - choice.saved_bytes) for choice, n in again)
    layer_peak = max((again_bytes(block, [choice for choice, _ in again]) for block, _, again in inner), default=0.0)
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
        (block.parameters * max([1, *(choice.group for choice, _ in again)]) for block, _, again in inner), default=0
    )
    return StageMemory(
        parameters=stage_parameters(price, shape),
        root_parameters=ends.shared,
        unit_parameters=(ends.first, *[largest] * min(2, sum(count for _, count, _ in inner)), ends.last),
        saved_bytes=saved,
        transient_bytes=max([0.0, layer_peak, *working]),
        in_flight=in_flight,
        receives_bytes=shape.receives_bytes,
        buffer_bytes=price.model.tables_bytes + sum(b.buffer_bytes * n for b, n, _ in blocks),
        logits_bytes=in_flight * logits,
        logits_at_peak_bytes=logits_at_peak,
        loss_chunks=price.loss_chunks,
    )


def rank_memory(stages: Sequence[StageMemory], waiting_bytes: Sequence[float], times: Sequence[Held]) -> StageMemory:
    """The stages of a rank together, at the fullest of its `times`.

    waiting_bytes: of a micro-batch in each stage whose gradients of weights are still to come.
    """
    saved = [stage.saved_bytes for stage in stages]
    held_bytes, fullest = max(
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
        held_bytes=held_bytes,
        logits_bytes=sum(n * stage.logits_bytes for n, stage in zip(fullest.activations, stages, strict=True)),
        logits_at_peak_bytes=sum(
            (n - 1) * stage.logits_bytes + stage.logits_at_peak_bytes
            for n, stage in zip(fullest.activations, stages, strict=True)
            if n
        ),
        loss_chunks=stages[0].loss_chunks,
    )


def again_bytes(block: BlockPrice, choices: Iterable[AgainPrice]) -> float:
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
    held = sum(block.parameters * n for block, n in zip(price.classes, shape.counts, strict=True))
    tied = sum(block.tied_parameters for block, n in zip(price.classes, shape.counts, strict=True) if n)
    return held + end_parameters(price, shape).total + (0 if shape.first else tied)


@dataclass(frozen=True)
class CollectiveCounts:
    """Collectives on the data axis in one step of one rank."""

    all_gather: int
    reduce_scatter: int
    all_reduce: int


def collective_counts(zero: int, micro_batches: int, units: int, copies: int = 1) -> CollectiveCounts:
    """DESIGN §6, last column, for `units` fully_shard units (the root counts if it has parameters).

    ZeRO 0 all-reduces once a unit (half precision, replicate mesh); outside fully_shard read `units` as buckets.
    Several `copies` (groups of hsdp) all-reduce once a unit, between each other.
    """
    gathers = {0: 0, 1: 1, 2: 1, 3: 2 * micro_batches}[zero]
    scatters = {0: 0, 1: 1, 2: micro_batches, 3: micro_batches}[zero]
    return CollectiveCounts(gathers * units, scatters * units, units if zero == 0 or copies > 1 else 0)


@dataclass(frozen=True)
class Resident:
    """Unsharded bytes on a rank between two micro-batches."""

    parameter_bytes: int
    gradient_bytes: int


def resident_bytes(states: States, parameters: int) -> Resident:
    """DESIGN §6, third column: what stays unsharded between micro-batches (between steps gradients are gone).

    Outside fully_shard the parameters themselves are whole.
    """
    copy = 0 if states.zero == 3 and states.has_copy else parameters * states.compute_bytes
    gradients = parameters * states.reduce_bytes if states.keeps_whole_gradients else 0
    return Resident(copy, gradients)


def optimizer_state_bytes(optimizer: Optimizer, precision: str) -> int:
    """Bytes a parameter of the optimizer's states, which torch keeps in the (master) parameter's dtype."""
    tensors = {
        "SGD": 1 if optimizer.kwargs.get("momentum", 0) else 0,
        "Adagrad": 1,
        "RMSprop": 1 + bool(optimizer.kwargs.get("momentum", 0)) + bool(optimizer.kwargs.get("centered", False)),
        "Adadelta": 2,
        **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax"), 2),
    }
    if optimizer.name not in tensors:
        raise PlanError(f"optimizer {optimizer.name!r} has no memory model: use one of {', '.join(sorted(tensors))}")
    amsgrad = bool(optimizer.kwargs.get("amsgrad", False)) and optimizer.name in ("Adam", "AdamW")
    return (tensors[optimizer.name] + amsgrad) * BYTES[MASTERS[precision]]


def ledger(stage: StageMemory, states: States, hardware: Hardware, world_size: int) -> tuple[MemoryTerm, ...]:
    """The terms of one stage; their sum is the peak in bytes."""
    activations = stage.activation_bytes - stage.logits_bytes
    held = stage.activation_bytes + stage.transient_bytes
    at_once = f", 1/{stage.loss_chunks} at once" if stage.loss_chunks > 1 else ""
    terms = [
        *_state_terms(stage, states, hardware),
        MemoryTerm(f"activations: {stage.in_flight} in flight", activations),
        MemoryTerm(f"logits{at_once}", stage.logits_at_peak_bytes),
        MemoryTerm("workspace, recomputed layer", held - activations - stage.logits_at_peak_bytes),
        *_buffer_terms(stage, states),
    ]
    allocated = total_bytes(terms)
    terms.append(MemoryTerm("allocator slack", allocated * hardware.allocator_slack))
    communicator = hardware.communicator_bytes if world_size > 1 else 0.0
    terms.append(MemoryTerm("context, communicators", hardware.context_bytes + communicator))
    return tuple(terms)


def total_bytes(terms: Iterable[MemoryTerm]) -> float:
    """Sum of the ledger."""
    return sum(term.size_bytes for term in terms)


def activation_room_bytes(
    stage: StageMemory, states: States, hardware: Hardware, world_size: int, budget_bytes: float
) -> float:
    """What the budget leaves for activations and workspace of this stage (negative: nothing fits)."""
    communicator = hardware.communicator_bytes if world_size > 1 else 0.0
    allocated = (budget_bytes - hardware.context_bytes - communicator) / (1 + hardware.allocator_slack)
    return allocated - total_bytes([*_state_terms(stage, states, hardware), *_buffer_terms(stage, states)])


def host_ledger(stage: StageMemory, states: States, hardware: Hardware) -> tuple[MemoryTerm, ...]:
    """What a rank keeps in the host's memory; nothing where the device is the host."""
    if not states.offload or hardware.host is None:
        return ()
    master, own, gradient = _sharded_terms(stage, states)
    pinned = MemoryTerm("rounding of pinned memory", _PINNED_ROUNDING * (master.size_bytes + gradient.size_bytes))
    return master, own, gradient, pinned


def _sharded_terms(stage: StageMemory, states: States) -> tuple[MemoryTerm, MemoryTerm, MemoryTerm]:
    """Masters, optimizer states and reduced gradients of this rank."""
    share = states.shards if states.zero >= 1 else 1
    shared = f", 1/{share}" if share > 1 else ""
    state_bytes = optimizer_state_bytes(states.optimizer, states.precision)
    return (
        MemoryTerm(f"master weights{shared}", stage.parameters * states.master_bytes / share),
        MemoryTerm(f"{states.optimizer.name} states{shared}", stage.parameters * state_bytes / share),
        MemoryTerm(f"gradients{shared}", stage.parameters * states.master_bytes / share),
    )


def _state_terms(stage: StageMemory, states: States, hardware: Hardware) -> list[MemoryTerm]:
    master, own, gradient = _sharded_terms(stage, states)
    copy = stage.parameters * states.compute_bytes if states.has_copy and states.zero < 3 else 0.0
    if states.keeps_whole_gradients:
        # At the last backward's start ZeRO-1 has them as they are reduced; after it ZeRO-0 has those of the masters.
        gradient_bytes = states.reduce_bytes if states.zero == 1 else states.master_bytes
        gradient = MemoryTerm("gradients", stage.parameters * gradient_bytes)
    if states.offload and hardware.host is not None:
        master, own = (MemoryTerm(f"{term.name} (on the host)", 0.0) for term in (master, own))
        if not (states.keeps_whole_gradients or states.waits_for_copies):
            gradient = MemoryTerm(f"{gradient.name} (on the host)", 0.0)
    return [MemoryTerm(f"parameters ({states.precision} copy)", copy), master, own, gradient]


def _buffer_terms(stage: StageMemory, states: States) -> list[MemoryTerm]:
    units = stage.unit_parameters
    unit = max((stage.root_parameters, *units))
    gathered = 0
    if states.zero == 3 and states.has_copy:
        pairs = (one + following for one, following in zip_longest(units, units[1:], fillvalue=0))
        gathered = (stage.root_parameters + max(pairs, default=0)) * states.compute_bytes
    if not states.has_copy:
        buffers: float = min(BUCKET_BYTES, stage.parameters * states.master_bytes) if states.shards > 1 else 0
    else:
        # One unit's gradient in the compute dtype and its copy in the dtype of the reduction.
        buffers = unit * (states.compute_bytes + states.reduce_bytes)
    # Of one unit the masters on their way to be gathered, of another the gradients on their way to the host.
    passing = 2 * unit * states.master_bytes / states.shards if states.offload else 0.0
    return [
        MemoryTerm("gathered units", gathered),
        MemoryTerm("reduction buffers", buffers),
        MemoryTerm("copies to and from the host", passing),
        MemoryTerm("buffers of the model", stage.buffer_bytes),
        MemoryTerm("pipeline receive buffers", states.micro_batches * stage.receives_bytes),
    ]
