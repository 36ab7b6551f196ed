"""The exact time of a pipeline step: a schedule fixes the order on every rank, so the step is a max-plus recurrence.

    start[op] = max(end[previous op of the rank], end[op it depends on] + p2p),   end = start + duration

The orders are those of autopar/plan/schedules.py, which are torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from autopar.plan.schedules import MULTI_STAGE, Op, in_turn, source_of

_STEADY = 8  # rounds after which a step may grow by the same time a round


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
    """Seconds from the step's start to the end of each rank's last op, where all micro-batches take the same.

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
