"""Pipeline schedules: the order of ops on each rank, its exact time, and the micro-batches in flight.

A schedule fixes the order on every rank, so the step is a max-plus recurrence:

    start[op] = max(end[previous op of the rank], end[op it depends on] + p2p),   end = start + duration

Orders are those of torch.distributed.pipelining (ScheduleGPipe, Schedule1F1B); a test compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

SCHEDULES = ("none", "gpipe", "1f1b")
Array = npt.NDArray[np.float64]


class Op(NamedTuple):
    """One forward ("F") or backward ("B") of a micro-batch."""

    kind: Literal["F", "B"]
    micro_batch: int


@dataclass(frozen=True)
class Timeline:
    """Seconds from the step's start: `end_s[stage]` of the last backward, `busy_s[stage]` spent in ops."""

    end_s: Array
    busy_s: Array


def order(schedule: str, stage: int, stages: int, micro_batches: int) -> tuple[Op, ...]:
    """The ops of one stage in the order they run.

    "none" (one stage): forward and backward of each micro-batch in turn. gpipe: all forwards, all backwards.
    1f1b: min(m, stages − stage) forwards, then one backward and one forward in turn, then the last backwards.
    """
    forwards = [Op("F", i) for i in range(micro_batches)]
    backwards = [Op("B", i) for i in range(micro_batches)]
    if schedule == "gpipe":
        return (*forwards, *backwards)
    warmup = min(micro_batches, stages - stage)
    steady = [op for pair in zip(backwards, forwards[warmup:], strict=False) for op in pair]
    return (*forwards[:warmup], *steady, *backwards[micro_batches - warmup :])


def in_flight(schedule: str, stage: int, stages: int, micro_batches: int) -> int:
    """The most micro-batches whose activations a stage holds: gpipe m, 1f1b min(m, stages − stage)."""
    if schedule == "gpipe":
        return micro_batches
    return min(micro_batches, stages - stage)


def simulate(schedule: str, forward_s: Array, backward_s: Array, send_s: Array) -> Timeline:
    """Run the schedule.

    forward_s, backward_s: seconds [stages, micro_batches, ...]; send_s: [stages − 1, ...] between neighbours,
    either way. Trailing dims are independent configurations, computed together.
    """
    stages, micro_batches = forward_s.shape[:2]
    duration = {"F": forward_s, "B": backward_s}
    end: dict[tuple[str, int, int], Array] = {}
    clock = [np.zeros(forward_s.shape[2:]) for _ in range(stages)]
    for stage, op in _topological(schedule, stages, micro_batches):
        start = clock[stage]
        source = _dependency(stage, op, stages)
        if source is not None:
            link = send_s[min(stage, source[1])] if source[1] != stage else 0.0
            start = np.maximum(start, end[source] + link)
        clock[stage] = start + duration[op.kind][stage, op.micro_batch]
        end[op.kind, stage, op.micro_batch] = clock[stage]
    return Timeline(np.stack(clock), forward_s.sum(axis=1) + backward_s.sum(axis=1))


def simulate_one(
    schedule: str,
    forward_s: Sequence[Sequence[float]],
    backward_s: Sequence[Sequence[float]],
    send_s: Sequence[float],
) -> list[float]:
    """`Timeline.end_s` of a single configuration; plain floats, ten times faster than arrays of one."""
    stages, micro_batches = len(forward_s), len(forward_s[0])
    clock = [0.0] * stages
    ends = {
        "F": [[0.0] * micro_batches for _ in range(stages)],
        "B": [[0.0] * micro_batches for _ in range(stages)],
    }
    for stage, (kind, i) in _topological(schedule, stages, micro_batches):
        ready = clock[stage]
        if kind == "F" and stage > 0:
            ready = max(ready, ends["F"][stage - 1][i] + send_s[stage - 1])
        elif kind == "B" and stage < stages - 1:
            ready = max(ready, ends["B"][stage + 1][i] + send_s[stage])
        clock[stage] = ready + (forward_s if kind == "F" else backward_s)[stage][i]
        ends[kind][stage][i] = clock[stage]
    return clock


def _dependency(stage: int, op: Op, stages: int) -> tuple[str, int, int] | None:
    if op.kind == "F":
        return ("F", stage - 1, op.micro_batch) if stage > 0 else None
    return ("B", stage + 1, op.micro_batch) if stage < stages - 1 else ("F", stage, op.micro_batch)


@cache
def _topological(schedule: str, stages: int, micro_batches: int) -> tuple[tuple[int, Op], ...]:
    """Every (stage, op), each after what it waits for. AssertionError if the orders deadlock."""
    orders = [order(schedule, stage, stages, micro_batches) for stage in range(stages)]
    position = [0] * stages
    done: set[tuple[str, int, int]] = set()
    result: list[tuple[int, Op]] = []
    total = sum(map(len, orders))
    while len(result) < total:
        before = len(result)
        for stage, ops in enumerate(orders):
            while position[stage] < len(ops):
                op = ops[position[stage]]
                source = _dependency(stage, op, stages)
                if source is not None and source not in done:
                    break
                done.add((op.kind, stage, op.micro_batch))
                result.append((stage, op))
                position[stage] += 1
        assert len(result) > before, f"{schedule} with {stages} stages, {micro_batches} micro-batches deadlocks"
    return tuple(result)
