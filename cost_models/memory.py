"""The memory ledger of one rank: what is resident, term by term, at the peak of a step.

States by states.py, activations by stage_memory.py, here as terms, with the buffers of what passes through.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import inf

from autopar.cost_models.compute import ModelPrice, StageShape
from autopar.cost_models.hardware import Hardware
from autopar.cost_models.stage_context import StageContext
from autopar.cost_models.stage_memory import StageMemory, memory_of
from autopar.cost_models.states import States, optimizer_state_bytes

BUCKET_BYTES = 25 * 2**20  # of the all-reduce outside fully_shard
# torch's allocator of pinned memory rounds each tensor up to a power of two: 1/ln 2 on average over sizes.
_PINNED_ROUNDING = 0.44


@dataclass(frozen=True)
class MemoryTerm:
    """One line of the ledger."""

    name: str
    size_bytes: float


def rank_ledger(
    price: ModelPrice, shapes: Sequence[StageShape], rank: int, context: StageContext
) -> tuple[MemoryTerm, ...]:
    """The memory terms of a rank with the stages of these shapes."""
    memory = memory_of(price, shapes, rank, context)
    return ledger(memory, context.states, context.hardware, context.mesh.world_size)


def rank_host_ledger(
    price: ModelPrice, shapes: Sequence[StageShape], rank: int, context: StageContext
) -> tuple[MemoryTerm, ...]:
    """What a rank keeps on the host."""
    return host_ledger(memory_of(price, shapes, rank, context), context.states, context.hardware)


def host_room_bytes(hardware: Hardware) -> float:
    """A rank's share of the host's memory; without end where the device is the host, whose memory is counted once."""
    return hardware.host.memory_bytes if hardware.host else inf


def ledger(stage: StageMemory, states: States, hardware: Hardware, world_size: int) -> tuple[MemoryTerm, ...]:
    """The terms of one stage; their sum is the peak in bytes."""
    activations = stage.activation_bytes - stage.logits_bytes
    resident = stage.activation_bytes + stage.transient_bytes
    at_once = f", 1/{stage.loss_chunks} at once" if stage.loss_chunks > 1 else ""
    terms = [
        *_state_terms(stage, states, hardware),
        MemoryTerm(f"activations: {stage.in_flight} in flight", activations),
        MemoryTerm(f"logits{at_once}", stage.logits_at_peak_bytes),
        MemoryTerm("workspace, recomputed layer", resident - activations - stage.logits_at_peak_bytes),
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
