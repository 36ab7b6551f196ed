"""The exact time of a pipeline step: a schedule fixes the order on every rank, so the step is a max-plus recurrence.

    start[op] = max(end[previous op of the rank], end[op it depends on] + p2p),   end = start + duration

The orders are those of autopar/plan/schedules.py, which are torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from autopar.plan.schedules import MULTI_STAGE, Op, in_turn, source_of

Array = npt.NDArray[np.float64]
_STEADY = 8  # rounds after which a step may grow by the same time a round


@dataclass(frozen=True)
class Timeline:
    """Seconds from the step's start: `end_s[rank]` of the last op, `busy_s[rank]` spent in ops."""

    end_s: Array
    busy_s: Array


def simulate(
    schedule: str, pp: int, forward_s: Array, backward_s: Array, send_s: Array, weight_s: Array | None = None
) -> Timeline:
    """Run the schedule.

    forward_s, backward_s: seconds [stages, micro_batches, ...]; send_s: [stages − 1, ...] from a stage to the next,
    either way. weight_s: what zero-bubble takes out of backward and runs later. Trailing dims are independent
    configurations, computed together.
    """
    stages, micro_batches = forward_s.shape[:2]
    later_s = np.zeros_like(forward_s) if weight_s is None else weight_s
    duration = {"F": forward_s, "B": backward_s, "I": backward_s, "W": later_s}
    end: dict[Op, Array] = {}
    clock = [np.zeros(forward_s.shape[2:]) for _ in range(pp)]
    for op in in_turn(schedule, pp, micro_batches, stages // pp):
        rank, start = op.stage % pp, clock[op.stage % pp]
        if source := source_of(op, stages):
            link = send_s[min(op.stage, source.stage)] if source.stage != op.stage else 0.0
            start = np.maximum(start, end[source] + link)
        clock[rank] = start + duration[op.kind][op.stage, op.micro_batch]
        end[op._replace(kind="B") if op.kind == "I" else op] = clock[rank]
    busy = (forward_s + backward_s + (later_s if schedule == "zero-bubble" else 0.0)).sum(axis=1)
    return Timeline(np.stack(clock), np.stack([busy[rank::pp].sum(axis=0) for rank in range(pp)]))


def simulate_one(
    schedule: str,
    pp: int,
    micro_batches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: Sequence[float],
    *,
    back_s: Sequence[float] | None = None,
    first_s: Sequence[float] | None = None,
    weight_s: Sequence[float] | None = None,
) -> list[float]:
    """`Timeline.end_s` where all micro-batches take the same; plain floats, far faster than arrays of one.

    forward_s, backward_s, weight_s: seconds by stage; first_s: what the first forward of each takes longer. send_s:
    from each stage to the next; back_s: the other way (None: the same).
    """
    none = [0.0] * len(forward_s)
    longer = [f + more for f, more in zip(forward_s, first_s or none, strict=True)]
    durations = [*forward_s, *backward_s, *(weight_s or none), *longer]

    def ends(count: int) -> list[float]:
        return _run(
            _steps(schedule, pp, count, len(forward_s) // pp),
            pp,
            durations,
            [*send_s, *(send_s if back_s is None else back_s), 0.0],
        )

    if schedule not in MULTI_STAGE or micro_batches % pp or micro_batches <= (_STEADY + 2) * pp:
        return ends(micro_batches)
    # From some round on, each makes the step longer by what the busiest rank does in it; where it does not, run all.
    work = [f + b + w for f, b, w in zip(forward_s, backward_s, weight_s or none, strict=True)]
    period_s = pp * max(sum(work[rank::pp]) for rank in range(pp))
    one, two, three = (ends((_STEADY + extra) * pp) for extra in (0, 1, 2))
    grown = [after - before for a, b in ((one, two), (two, three)) for before, after in zip(a, b, strict=True)]
    if any(abs(growth - period_s) > 1e-9 * period_s for growth in grown):
        return ends(micro_batches)
    return [end + (micro_batches // pp - _STEADY - 2) * period_s for end in three]


Step = tuple[int, int, int, int, int]  # rank, place of the duration, of the end, of the end waited for, of the link


def _run(steps: Sequence[Step], pp: int, durations: Sequence[float], links: Sequence[float]) -> list[float]:
    clock = [0.0] * pp
    ends = [0.0] * (len(steps) + 1)  # the last one is waited for by who waits for nothing
    for rank, duration, end, source, link in steps:
        ready = ends[source] + links[link]
        if ready < clock[rank]:
            ready = clock[rank]
        ends[end] = clock[rank] = ready + durations[duration]
    return clock


@cache
def _steps(schedule: str, pp: int, micro_batches: int, virtual_stages: int) -> tuple[Step, ...]:
    stages, places, steps = pp * virtual_stages, dict[Op, int](), list[Step]()
    for place, op in enumerate(in_turn(schedule, pp, micro_batches, virtual_stages)):
        places[op._replace(kind="B") if op.kind == "I" else op] = place
        kind = {"F": 3 if op.micro_batch == 0 else 0, "B": 1, "I": 1, "W": 2}[op.kind]
        source = source_of(op, stages)
        link = -1 if source is None or source.stage == op.stage else min(op.stage, source.stage)
        link += stages - 1 if link >= 0 and op.kind != "F" else 0  # gradients go back
        waits = -1 if source is None else places[source]
        steps.append((op.stage % pp, kind * stages + op.stage, place, waits, link))
    return tuple(steps)
