"""Schedules against torch's own tables, closed forms, and each other."""

from __future__ import annotations

from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

from autopar.cost_models.pipeline import in_flight, order, simulate, simulate_one

TORCH = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def torch_order(schedule: str, stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """The chunks that torch's own step loop runs on a stage, recorded by a stand-in for its PipelineStage.

    Not `_get_pipeline_order`: in torch 2.13 its 1F1B table is off by one micro-batch on the last stage.
    """
    ran: list[tuple[str, int]] = []
    recorder = MagicMock(stage_index=stage, is_last=stage == stages - 1)
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(recorder, name).return_value = []
    recorder.forward_one_chunk.side_effect = lambda i, *args, **kwargs: ran.append(("F", i))
    recorder.backward_one_chunk.side_effect = lambda i, *args, **kwargs: ran.append(("B", i))
    loop = MagicMock(_n_microbatches=micro_batches, _num_stages=stages, _stage=recorder)
    loop._check_inputs.return_value = ([()] * micro_batches, [{}] * micro_batches)
    TORCH[schedule]._step_microbatches(loop)
    return ran


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 5), (3, 3), (4, 4), (4, 16), (8, 11)])
def test_orders_are_torchs(schedule: str, stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        ours = [(str(kind), i) for kind, i in order(schedule, stage, stages, micro_batches)]
        assert ours == torch_order(schedule, stage, stages, micro_batches)


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.integers(1, 20))
def test_micro_batches_in_flight_follow_from_the_order(schedule: str, stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        held = most = 0
        for op in order(schedule, stage, stages, micro_batches):
            held += 1 if op.kind == "F" else -1
            most = max(most, held)
        assert held == 0
        assert most == in_flight(schedule, stage, stages, micro_batches)


def test_one_stage_runs_micro_batches_in_turn() -> None:
    assert [str(op.kind) for op in order("none", 0, 1, 3)] == ["F", "B"] * 3
    assert in_flight("none", 0, 1, 3) == 1


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 20), st.floats(0.1, 3), st.floats(0.1, 3))
def test_equal_stages_take_the_closed_form(schedule: str, p: int, m: int, forward: float, backward: float) -> None:
    ends = simulate_one(schedule, [[forward] * m] * p, [[backward] * m] * p, [0.0] * (p - 1))
    assert max(ends) == pytest.approx((m + p - 1) * (forward + backward))


def test_a_slow_last_stage_takes_the_closed_form() -> None:
    forward, backward, m = [1.0, 1.0, 1.0, 1.3], [2.0, 2.0, 2.0, 2.6], 16
    ends = simulate_one("1f1b", [[f] * m for f in forward], [[b] * m for b in backward], [0.0] * 3)
    assert max(ends) == pytest.approx(sum(forward) + sum(backward) + (m - 1) * 3.9)


@given(
    st.sampled_from(["gpipe", "1f1b"]),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(0, 2**32 - 1),
)
def test_arrays_and_single_configurations_agree(schedule: str, p: int, m: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    forward, backward = generator.random((p, m, 3)), generator.random((p, m, 3))
    send = generator.random((p - 1, 3))
    timeline = simulate(schedule, forward, backward, send)
    for n in range(3):
        one = simulate_one(schedule, forward[..., n].tolist(), backward[..., n].tolist(), send[..., n].tolist())
        assert timeline.end_s[:, n].tolist() == pytest.approx(one)
    # A stage works all its ops, after the forwards and before the backwards of the stages before it.
    work = timeline.busy_s
    before = np.concatenate([np.zeros((1, 3)), np.cumsum(forward[:, 0], axis=0)[:-1]])
    assert (timeline.end_s >= work + before - 1e-9).all()
