"""Pipeline schedules: what is legal, the order of ops on each rank, and the micro-batches that a rank holds.

With v virtual stages a rank there are pp · v stages in model order; rank r has the stages r, r + pp, r + 2·pp, …

    schedule     v    a rank runs
    gpipe        1    all forwards, then all backwards
    1f1b         1    min(m, pp − r) forwards, then backwards and forwards in turn
    interleaved  ≥ 2  1f1b over its v stages, which take turns every `round` micro-batches
    zero-bubble  ≥ 1  the same with each backward in two: gradients of inputs (I), later those of weights (W)

The orders are those of torch.distributed.pipelining (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B,
ScheduleInterleavedZeroBubble, the ZB1P of arXiv:2401.10241); a test compares them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Literal, NamedTuple

from ..runtime.choices import SCHEDULES

MULTI_STAGE = ("interleaved", "zero-bubble")  # a rank may have several stages


class Op(NamedTuple):
    """A forward ("F"), a backward ("B"), or a half of one ("I": of inputs, "W": of weights), of a micro-batch."""

    kind: Literal["F", "B", "I", "W"]
    stage: int
    micro_batch: int


class InFlight(NamedTuple):
    """Micro-batches that a rank holds at one time, by its stages in order.

    activations: between forward and the end of backward. waiting: those of them whose gradients of weights are
    still to come, so that the gradients of their matmuls' results are held too.
    """

    activations: tuple[int, ...]
    waiting: tuple[int, ...]


def why_not(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> str:
    """Why a schedule cannot be, with the arithmetic and the way out; "" where it can."""
    v, m = virtual_stages, micro_batches
    if schedule not in SCHEDULES or (schedule == "none") != (pp == 1):
        legal = "none" if pp == 1 else ", ".join(SCHEDULES[1:-1]) + f" or {SCHEDULES[-1]}"
        return f"schedule={schedule!r} with pp={pp}: use {legal}"
    if v > 1 and schedule not in MULTI_STAGE:
        return f"schedule={schedule!r} has one stage a rank, not virtual_stages={v}: use interleaved or zero-bubble"
    if v < 2 and schedule == "interleaved":
        return "interleaved is for virtual_stages of 2 or more: with one stage a rank use 1f1b"
    if schedule == "1f1b" and m < pp:
        return (
            f"1f1b needs at least as many micro-batches as stages: {m} < pp={pp}; "
            "use schedule='gpipe', a smaller micro_batch or fewer stages"
        )
    rounds = max(1, m // pp)
    if schedule in MULTI_STAGE and m % rounds:
        near = [n for n in (m - m % rounds, -(-m // pp) * pp)]
        return (
            f"{schedule} takes micro-batches in {m} // pp={pp} = {rounds} equal rounds, and {m} is not divisible by "
            f"{rounds}: use {' or '.join(map(str, near))} micro-batches, as any multiple of pp"
        )
    return ""


def why_not_split(schedule: str, zero: int, recompute: bool, compiled: bool = False) -> str:
    """Why backward cannot come in two halves with these choices; "" where it can, or is whole."""
    if schedule != "zero-bubble":
        return ""
    if zero >= 2:
        return (
            f"zero-bubble with zero={zero}: torch's halves of a backward do not gather and reduce between them (tried: "
            "wrong gradients, without an error); use zero=0 or 1, or schedule='interleaved' or '1f1b'"
        )
    if recompute:
        return (
            "zero-bubble with recompute: gradients of weights come in a second pass, which would run a recomputed "
            "forward again for each group of parameters; use recompute none, or schedule='interleaved' or '1f1b'"
        )
    if compiled:
        return (
            "zero-bubble with compile: a compiled layer has one backward for inputs and weights; "
            "use compile=False, or schedule='interleaved' or '1f1b'"
        )
    return ""


# --------------------------------------------------------------------------------
# Orders


def order(schedule: str, rank: int, pp: int, micro_batches: int, virtual_stages: int = 1) -> tuple[Op, ...]:
    """The ops of one rank in the order they run."""
    if schedule in MULTI_STAGE:
        rounds = max(1, micro_batches // pp)
        return _looped(schedule, rank, pp, virtual_stages, micro_batches // rounds, rounds)
    forwards = [Op("F", rank, i) for i in range(micro_batches)]
    backwards = [Op("B", rank, i) for i in range(micro_batches)]
    if schedule == "gpipe":
        return (*forwards, *backwards)
    warmup = min(micro_batches, pp - rank)
    steady = [op for pair in zip(backwards, forwards[warmup:], strict=False) for op in pair]
    return (*forwards[:warmup], *steady, *backwards[micro_batches - warmup :])


@cache
def _looped(schedule: str, rank: int, pp: int, v: int, size: int, rounds: int) -> tuple[Op, ...]:
    """`rounds` rounds of `size` micro-batches: each runs through the rank's stages, forwards up, backwards down."""
    split = schedule == "zero-bubble"
    forwards = deque(_turns("F", rank, pp, range(v), size, rounds))
    backwards = deque(_turns("I" if split else "B", rank, pp, range(v - 1, -1, -1), size, rounds))
    weights = deque(op._replace(kind="W") for op in backwards) if split else deque[Op]()
    hop = 1 if split else 2  # warm-up forwards more, for each rank that is nearer to the start
    ops = [forwards.popleft() for _ in range(min((v - 1) * size + hop * (pp - 1 - rank), v * size * rounds))]
    done = 0
    while backwards:
        ops += [forwards.popleft()] if forwards else []
        ops.append(backwards.popleft())
        if split and done >= rank:  # the first `rank` weight gradients wait, to fill the bubble at the end
            ops.append(weights.popleft())
        done += 1
    return (*ops, *weights)


def _turns(
    kind: Literal["F", "B", "I", "W"], rank: int, pp: int, chunks: range, size: int, rounds: int
) -> Iterator[Op]:
    for first in range(0, rounds * size, size):
        for chunk in chunks:
            yield from (Op(kind, chunk * pp + rank, first + i) for i in range(size))


def source_of(op: Op, stages: int) -> Op | None:
    """The op of another stage, or the forward, whose result an op needs; backwards are named "B", halved or not."""
    if op.kind == "F":
        return Op("F", op.stage - 1, op.micro_batch) if op.stage > 0 else None
    if op.kind == "W":
        return None  # its other half is earlier on the same rank
    return Op("B", op.stage + 1, op.micro_batch) if op.stage < stages - 1 else Op("F", op.stage, op.micro_batch)


def in_turn(schedule: str, pp: int, micro_batches: int, virtual_stages: int = 1) -> tuple[Op, ...]:
    """The ops of all ranks, each after what it waits for. AssertionError if the orders cannot be so."""
    orders = [deque(order(schedule, rank, pp, micro_batches, virtual_stages)) for rank in range(pp)]
    stages, done, result = pp * virtual_stages, set[Op](), list[Op]()
    while any(orders):
        before = len(result)
        for ops in orders:
            while ops and ((source := source_of(ops[0], stages)) is None or source in done):
                op = ops.popleft()
                done.add(op._replace(kind="B") if op.kind == "I" else op)
                result.append(op)
        assert len(result) > before, f"{schedule} with pp={pp}, v={virtual_stages}, m={micro_batches} cannot go on"
    return tuple(result)


# --------------------------------------------------------------------------------
# What a rank holds

_ROUNDS = 4  # more of them hold no more


@cache
def fullest_times(
    schedule: str, rank: int, pp: int, micro_batches: int, virtual_stages: int = 1
) -> tuple[InFlight, ...]:
    """What a rank holds at its fullest times: no other time holds as much or more of everything.

    gpipe: m; 1f1b: min(m, pp − rank).
    """
    if schedule == "gpipe":
        return (InFlight((micro_batches,), (0,)),)
    if schedule not in MULTI_STAGE:
        return (InFlight((min(micro_batches, pp - rank),), (0,)),)
    rounds = max(1, micro_batches // pp)
    return _fullest(schedule, rank, pp, virtual_stages, micro_batches // rounds, min(rounds, _ROUNDS))


@cache
def _fullest(schedule: str, rank: int, pp: int, v: int, size: int, rounds: int) -> tuple[InFlight, ...]:
    activations, waiting = [0] * v, [0] * v
    times: dict[InFlight, None] = {}
    grown = False
    for op in _looped(schedule, rank, pp, v, size, rounds):
        chunk = op.stage // pp
        if op.kind == "F":
            activations[chunk] += 1
        elif op.kind == "I":
            waiting[chunk] += 1
        elif grown:  # the fullest times are just before something is freed
            times[InFlight(tuple(activations), tuple(waiting))] = None
        grown = op.kind in "FI"
        if op.kind in "BW":
            activations[chunk] -= 1
        if op.kind == "W":
            waiting[chunk] -= 1
    return tuple(time for time in times if not any(_covers(other, time) for other in times if other != time))


def _covers(more: InFlight, less: InFlight) -> bool:
    pairs = zip((*more.activations, *more.waiting), (*less.activations, *less.waiting), strict=True)
    return all(a >= b for a, b in pairs)


def in_flight(schedule: str, rank: int, pp: int, micro_batches: int, virtual_stages: int = 1) -> int:
    """The most activations of a micro-batch in one stage that a rank holds."""
    return max(sum(time.activations) for time in fullest_times(schedule, rank, pp, micro_batches, virtual_stages))
