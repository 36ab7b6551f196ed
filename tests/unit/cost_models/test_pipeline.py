"""The simulation against closed forms, and against itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.pipeline import simulate_one
from autopar.plan.schedules import Op, in_turn, source_of, why_not

MULTI = [("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1), ("zero-bubble", 2)]
EVERY = [("gpipe", 1), ("1f1b", 1), *MULTI]

Array = npt.NDArray[np.float64]


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


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 20), st.floats(0.1, 3), st.floats(0.1, 3))
def test_equal_stages_take_the_closed_form(schedule: str, p: int, m: int, forward: float, backward: float) -> None:
    ends = simulate_one(schedule, p, m, [forward] * p, [backward] * p, [0.0] * (p - 1))
    assert max(ends) == pytest.approx((m + p - 1) * (forward + backward))


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize("rounds", [1, 3, 40])
def test_interleaved_takes_the_closed_form(p: int, v: int, rounds: int) -> None:
    """COST_MODEL 2.3: m(F + B) + (p − 1)(F + B)/v where p divides m, F and B of a whole rank."""
    m, stages = rounds * p, p * v
    ends = simulate_one("interleaved", p, m, [1.0 / v] * stages, [2.0 / v] * stages, [0.0] * (stages - 1))
    assert max(ends) == pytest.approx(3.0 * m + (p - 1) * 3.0 / v)


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("m", [8, 24])
def test_zero_bubble_has_the_bubble_of_its_paper(p: int, m: int) -> None:
    """ZB-H1: (p − 1)(F + B − 2W), where B is both halves, here a third of 1F1B's."""
    ends = simulate_one("zero-bubble", p, m, [1.0] * p, [1.0] * p, [0.0] * (p - 1), weight_s=[1.0] * p)
    assert max(ends) == pytest.approx(3.0 * m + (p - 1) * 1.0)


def test_a_slow_last_stage_takes_the_closed_form() -> None:
    forward, backward, m = [1.0, 1.0, 1.0, 1.3], [2.0, 2.0, 2.0, 2.6], 16
    ends = simulate_one("1f1b", 4, m, forward, backward, [0.0] * 3)
    assert max(ends) == pytest.approx(sum(forward) + sum(backward) + (m - 1) * 3.9)


@given(st.sampled_from(EVERY), st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_arrays_and_single_configurations_agree(kind: tuple[str, int], p: int, m: int, seed: int) -> None:
    schedule, v = kind
    if schedule in ("interleaved", "zero-bubble") and (p == 1 or why_not(schedule, p, v, m)):
        return
    generator = np.random.default_rng(seed)
    stages = p * v
    forward, backward, weight = (generator.random((stages, 3)) for _ in range(3))
    weight *= schedule == "zero-bubble"
    first, send = generator.random((stages, 3)), generator.random((stages - 1, 3))
    each = np.repeat(forward[:, None], m, axis=1)
    each[:, 0] += first
    backwards, weights = (np.repeat(x[:, None], m, axis=1) for x in (backward, weight))
    timeline = simulate(schedule, p, each, backwards, send, weights)
    for n in range(3):
        one = simulate_one(
            schedule, p, m, *(x[:, n].tolist() for x in (forward, backward, send)),
            first_s=first[:, n].tolist(), weight_s=weight[:, n].tolist(),
        )  # fmt: skip
        assert timeline.end_s[:, n].tolist() == pytest.approx(one)
    # A rank works all its ops, after the forwards of the stages before its first.
    before = np.concatenate([np.zeros((1, 3)), np.cumsum(each[:p, 0], axis=0)[:-1]])
    assert (timeline.end_s >= timeline.busy_s + before - 1e-9).all()


@pytest.mark.parametrize(("schedule", "v"), MULTI)
@pytest.mark.parametrize("seed", range(6))
def test_many_rounds_are_extrapolated_exactly(schedule: str, v: int, seed: int) -> None:
    """Seeds 0–2: nearly equal stages, where the busiest rank tells late."""
    generator = np.random.default_rng(seed)
    p, m = 4, 4 * 40
    spread = 0.01 if seed < 3 else 1.0
    forward, backward, weight = ((1 + spread * generator.random(p * v)).tolist() for _ in range(3))
    send = (0.1 * generator.random(p * v - 1)).tolist()
    weight = weight if schedule == "zero-bubble" else [0.0] * (p * v)
    fast = simulate_one(schedule, p, m, forward, backward, send, weight_s=weight)
    each, backwards, weights = (np.repeat(np.array(x)[:, None], m, axis=1) for x in (forward, backward, weight))
    whole = simulate(schedule, p, each, backwards, np.array(send), weights)
    assert fast == pytest.approx(whole.end_s.tolist(), rel=1e-9)
