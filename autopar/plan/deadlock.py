"""Whether the sends and receives of a schedule can all meet: they are simulated before a program is emitted.

Each rank has a sequence of posts. Transfers of one post start together, and the rank waits until all have met
their other side: a blocking rendezvous, which asks more than gloo or NCCL do.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .schedules import MULTI_STAGE, Op, order

_AHEAD = 3

Link = tuple[int, int]  # (stage that makes a value, stage that reads it)


class Transfer(NamedTuple):
    """One value of a micro-batch ("F"), or its gradient ("B"), on its way from a stage to another."""

    kind: str
    source: int
    target: int
    micro_batch: int


Post = tuple[Transfer, ...]


def posts(schedule: str, pp: int, micro_batches: int, virtual_stages: int, links: Sequence[Link]) -> list[list[Post]]:
    """What each rank sends and receives in a step, in order, where values go along `links`."""
    if schedule in MULTI_STAGE:
        return _in_step(schedule, pp, micro_batches, virtual_stages, links)
    return [_single(schedule, rank, pp, micro_batches, links) for rank in range(pp)]


def deadlock(ranks: Sequence[Sequence[Post]], pp: int) -> str:
    """What the ranks wait for when none can go on; "" where all come to their end."""
    waiting = [deque(of_rank) for of_rank in ranks]
    open_ = [set(of_rank[0]) if of_rank else set[Transfer]() for of_rank in waiting]
    ready = deque(range(len(ranks)))
    while ready:
        rank = ready.popleft()
        for transfer in list(open_[rank]):
            ends = {transfer.source % pp, transfer.target % pp}
            if len(ends) > 1 and all(transfer in open_[end] for end in ends):
                for end in ends:
                    open_[end].discard(transfer)
                    ready.append(end)
        while waiting[rank] and not open_[rank]:
            waiting[rank].popleft()
            open_[rank] = set(waiting[rank][0]) if waiting[rank] else set()
            ready.append(rank)
    stuck = [f"rank {rank} at {_text(min(left), rank, pp)}" for rank, left in enumerate(open_) if left]
    return "; ".join(stuck)


def _text(transfer: Transfer, rank: int, pp: int) -> str:
    what = "gradient" if transfer.kind == "B" else "value"
    sends = transfer.source % pp == rank
    way = f"sending to stage {transfer.target}" if sends else f"receiving from stage {transfer.source}"
    return f"{way} the {what} of micro-batch {transfer.micro_batch}"


def _received(op: Op, links: Iterable[Link]) -> Post:
    """What an op must have received."""
    if op.kind == "W":
        return ()
    if op.kind == "F":
        return tuple(Transfer("F", a, b, op.micro_batch) for a, b in links if b == op.stage)
    return tuple(Transfer("B", b, a, op.micro_batch) for a, b in links if a == op.stage)


def _sent(op: Op, links: Iterable[Link]) -> Post:
    """What is sent once an op has run."""
    if op.kind == "W":
        return ()
    if op.kind == "F":
        return tuple(Transfer("F", a, b, op.micro_batch) for a, b in links if a == op.stage)
    return tuple(Transfer("B", b, a, op.micro_batch) for a, b in links if b == op.stage)


def _single(schedule: str, rank: int, pp: int, micro_batches: int, links: Sequence[Link]) -> list[Post]:
    """gpipe: one after the other. 1f1b: what an op sends and the next one of the other kind receives, together."""
    ops = order(schedule, rank, pp, micro_batches)
    found: list[Post] = []
    sent: Post = ()
    for before, op in zip((None, *ops), ops, strict=False):
        received = _received(op, links)
        fused = schedule == "1f1b" and before is not None and before.kind != op.kind
        found += [sent + received] if fused else [sent, received]
        sent = _sent(op, links)
    return [post for post in (*found, sent) if post]


def _in_step(
    schedule: str, pp: int, micro_batches: int, virtual_stages: int, links: Sequence[Link]
) -> list[list[Post]]:
    """As torch's `_add_send_recv` places them: a receive is posted when its sender has come to the send.

    Ranks take turns, one action each.
    """
    orders = {rank: deque(_with_pauses(order(schedule, rank, pp, micro_batches, virtual_stages))) for rank in range(pp)}
    found: list[list[Post]] = [[] for _ in range(pp)]
    arrived: dict[int, set[Transfer]] = defaultdict(set)
    while orders:
        before = sum(map(len, orders.values()))
        for rank in sorted(orders):
            op = orders[rank][0]
            if op and not arrived[rank].issuperset(_received(op, links)):
                continue
            for transfer in _sent(op, links) if op else ():
                peer = transfer.target % pp
                found[rank].append((transfer,))
                found[peer].append((transfer,))
                arrived[peer].add(transfer)
            orders[rank].popleft()
            if not orders[rank]:
                del orders[rank]
        if before == sum(map(len, orders.values())):  # what is left waits for values that never come
            for rank, ops in orders.items():
                found[rank] += [_received(ops[0], links)] if ops[0] else []
            break
    return found


def _with_pauses(ops: Sequence[Op]) -> Iterator[Op | None]:
    """The ops, with None where torch's table has an action of fully_shard: they take turns too.

    It unshards the next three stages ahead, reshards those that are not among them, and reduces a stage's gradients
    after its last backward (`_add_unshard_reshard`, `_add_reduce_grad`).
    """
    active: set[int] = set()
    last = {op.stage: place for place, op in enumerate(ops)}
    for place, op in enumerate(ops):
        ahead = {stage for stage, end in last.items() if end >= place}
        if len(ahead) > _AHEAD:
            ahead = set()
            for at in range(place, len(ops)):
                ahead.add(ops[at].stage)
                if len(ahead) == _AHEAD:
                    break
        yield from [None] * len(ahead ^ active)
        active = ahead
        yield op
        if last[op.stage] == place:
            yield None
