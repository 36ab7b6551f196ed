"""DESIGN §6's table of the ZeRO stages as functions: collectives of a step, and bytes between micro-batches.

Runs of the runtime are held against it.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.states import States


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
