"""Schedules against torch's own tables; what is held; what cannot be, with the way out; sends that never meet."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from autopar.plan.deadlock import Post, Transfer, deadlock, posts
from autopar.plan.schedules import (
    MULTI_STAGE,
    InFlight,
    Op,
    fullest_times,
    in_flight,
    in_turn,
    order,
    why_not,
    why_not_split,
)

TORCH: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}
LOOPED = [
    (schedule, pp, v, m)
    for schedule in MULTI_STAGE
    for pp in (2, 3, 4)
    for v in (1, 2, 3)
    for m in (1, 2, 3, 4, 6, 8, 10, 12)
    if not why_not(schedule, pp, v, m)
]


def torch_single(schedule: str, stage: int, stages: int, micro_batches: int) -> list[Op]:
    """The chunks that torch's own step loop runs on a stage, recorded by a stand-in for its PipelineStage.

    Not `_get_pipeline_order`: in torch 2.13 its 1F1B table is off by one micro-batch on the last stage.
    """
    ran: list[Op] = []
    recorder = MagicMock(stage_index=stage, is_last=stage == stages - 1)
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(recorder, name).return_value = []
    recorder.forward_one_chunk.side_effect = lambda i, *args, **kwargs: ran.append(Op("F", stage, i))
    recorder.backward_one_chunk.side_effect = lambda i, *args, **kwargs: ran.append(Op("B", stage, i))
    loop = MagicMock(_n_microbatches=micro_batches, _num_stages=stages, _stage=recorder)
    loop._check_inputs.return_value = ([()] * micro_batches, [{}] * micro_batches)
    TORCH[schedule]._step_microbatches(loop)
    return ran


def torch_looped(schedule: str, pp: int, v: int, m: int) -> Any:
    """torch's schedule of several stages a rank, with its tables of ops and of communication."""
    stages = [MagicMock(num_stages=pp * v, group_size=pp, group_rank=0, stage_index=pp * k) for k in range(v)]
    return TORCH[schedule](stages, m, loss_fn=lambda *_: None)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 5), (3, 3), (4, 4), (4, 16), (8, 11)])
def test_orders_are_torchs(schedule: str, stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        assert list(order(schedule, stage, stages, micro_batches)) == torch_single(
            schedule, stage, stages, micro_batches
        )


@pytest.mark.parametrize(("schedule", "pp", "v", "m"), LOOPED)
def test_orders_with_virtual_stages_are_torchs(schedule: str, pp: int, v: int, m: int) -> None:
    """`pipeline_order` and `pipeline_order_with_comms`: the ops of each rank, and its sends and receives."""
    table = torch_looped(schedule, pp, v, m)
    links = [(k, k + 1) for k in range(pp * v - 1)]
    ours = posts(schedule, pp, m, v, links)
    for rank in range(pp):
        actions = [a for a in table.pipeline_order[rank] if a is not None]
        theirs = [str(a) for a in actions]
        assert [f"{stage}{kind}{i}" for kind, stage, i in order(schedule, rank, pp, m, v)] == theirs
        assert [_action(post[0], rank, pp) for post in ours[rank]] == [
            str(a) for a in table.pipeline_order_with_comms[rank] if "SEND" in str(a) or "RECV" in str(a)
        ]


def _action(transfer: Transfer, rank: int, pp: int) -> str:
    """A transfer in torch's words, from one of its ends."""
    sends = transfer.source % pp == rank
    stage = transfer.source if sends else transfer.target
    return f"{stage}{'SEND' if sends else 'RECV'}_{transfer.kind}{transfer.micro_batch}"


@pytest.mark.parametrize("m", [5, 7])
def test_what_torch_refuses_is_refused(m: int) -> None:
    for schedule in MULTI_STAGE:
        why = why_not(schedule, 2, 2, m)
        assert f"{m} // pp=2 = {m // 2} equal rounds, and {m} is not divisible by {m // 2}" in why
        assert f"use {m - 1} or {m + 1} micro-batches" in why
        assert not why_not(schedule, 2, 2, m - 1) and not why_not(schedule, 2, 2, m + 1)
        with pytest.raises(ValueError, match="number of microbatches to be a multiple of the number of rounds"):
            torch_looped(schedule, 2, 2, m)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("1f1b", 1, 1, 4), "schedule='1f1b' with pp=1: use none"),
        (("none", 2, 1, 4), "schedule='none' with pp=2: use gpipe, 1f1b, interleaved or zero-bubble"),
        (("1f1b", 2, 2, 4), "schedule='1f1b' has one stage a rank, not virtual_stages=2"),
        (("interleaved", 2, 1, 4), "interleaved is for virtual_stages of 2 or more"),
        (("1f1b", 4, 1, 2), "2 < pp=4; use schedule='gpipe'"),
    ],
)
def test_what_cannot_be_says_why(arguments: tuple[str, int, int, int], why: str) -> None:
    assert why in why_not(*arguments)


def test_a_backward_in_halves_neither_reshards_nor_recomputes() -> None:
    assert "use zero=0 or 1" in why_not_split("zero-bubble", 2, False)
    assert "use recompute none" in why_not_split("zero-bubble", 1, True)
    assert not why_not_split("zero-bubble", 1, False) and not why_not_split("interleaved", 3, True)


# --------------------------------------------------------------------------------
# What is held


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.integers(1, 20))
def test_micro_batches_in_flight_follow_from_the_order(schedule: str, stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        count = most = 0
        for op in order(schedule, stage, stages, micro_batches):
            count += 1 if op.kind == "F" else -1
            most = max(most, count)
        assert count == 0
        assert most == in_flight(schedule, stage, stages, micro_batches)


def test_one_stage_runs_micro_batches_in_turn() -> None:
    assert [str(op.kind) for op in order("none", 0, 1, 3)] == ["F", "B"] * 3
    assert in_flight("none", 0, 1, 3) == 1


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("v", [2, 3])
def test_in_flight_takes_the_closed_form(pp: int, v: int) -> None:
    """COST_MODEL 2.3: interleaved min(m·v, 2(p − i − 1) + (v − 1)p + 1) stages on rank i; zero-bubble holds pp."""
    for rank in range(pp):
        assert in_flight("interleaved", rank, pp, 3 * pp, v) == 2 * (pp - rank - 1) + (v - 1) * pp + 1
        (most,) = {sum(time.activations) for time in fullest_times("zero-bubble", rank, pp, 6 * pp)}
        assert most == pp  # those between forward and I, and those that wait for W, add up to pp
        assert fullest_times("zero-bubble", rank, pp, 6 * pp) == (InFlight((pp,), (rank + 1,)),)


def test_more_rounds_hold_no_more() -> None:
    for schedule, pp, v, _ in LOOPED:
        for rank in range(pp):
            assert fullest_times(schedule, rank, pp, 4 * pp, v) == fullest_times(schedule, rank, pp, 9 * pp, v)
            count = [0] * v
            times = set()
            for op in order(schedule, rank, pp, 9 * pp, v):
                count[op.stage // pp] += {"F": 1, "I": 0}.get(op.kind, -1)
                times.add(tuple(count))
            most = fullest_times(schedule, rank, pp, 9 * pp, v)
            assert all(any(all(map(int.__le__, time, top.activations)) for top in most) for time in times)


# --------------------------------------------------------------------------------
# Rendezvous


@pytest.mark.parametrize(("schedule", "pp", "v", "m"), [*LOOPED, ("gpipe", 3, 1, 4), ("1f1b", 4, 1, 6)])
def test_p6_every_send_meets_its_receive(schedule: str, pp: int, v: int, m: int) -> None:
    links = [(k, k + 1) for k in range(pp * v - 1)]
    assert not deadlock(posts(schedule, pp, m, v, links), pp)
    assert len(in_turn(schedule, pp, m, v)) == (3 if schedule == "zero-bubble" else 2) * pp * v * m


def test_p6_a_naive_interleaved_order_is_seen_to_hang() -> None:
    """Each rank receives just before and sends just after an op: with virtual stages both send, none receives."""

    def naive(rank: int) -> list[Post]:
        found: list[Post] = []
        for kind, stage, i in order("interleaved", rank, 2, 2, 2):
            before, after = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
            found += [(Transfer(kind, before, stage, i),)] if 0 <= before < 4 else []
            found += [(Transfer(kind, stage, after, i),)] if 0 <= after < 4 else []
        return found

    stuck = deadlock([naive(0), naive(1)], 2)
    assert "rank 0 at sending to stage 1 the value of micro-batch 1" in stuck
    assert "rank 1 at sending to stage 2 the value of micro-batch 0" in stuck


def test_p6_a_skip_link_that_nobody_forwards_is_seen_to_hang() -> None:
    """A U-Net's skip from stage 0 to 2, sent at once where it is made but received before what is between."""
    straight = [(0, 1), (1, 2), (0, 2)]
    assert not deadlock(posts("1f1b", 3, 4, 1, straight), 3)
    wrong = posts("1f1b", 3, 4, 1, straight)
    skip, through = Transfer("F", 0, 2, 0), Transfer("F", 0, 1, 0)
    wrong[0] = [(skip,), (through,), *(tuple(t for t in post if t not in (skip, through)) for post in wrong[0])]
    wrong[2] = [
        (Transfer("F", 1, 2, 0),),
        *(tuple(t for t in post if t != Transfer("F", 1, 2, 0)) for post in wrong[2]),
    ]
    assert "rank 0 at sending to stage 2 the value of micro-batch 0" in deadlock(wrong, 3)


def test_p6_a_value_that_never_comes_is_told() -> None:
    table = posts("interleaved", 2, 2, 2, [(0, 1), (1, 2), (2, 3)])
    table[1] = [post for post in table[1] if post != (Transfer("F", 1, 2, 0),)]
    assert "rank 0 at receiving from stage 1 the value of micro-batch 0" in deadlock(table, 2)
