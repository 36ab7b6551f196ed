"""The ledger against DESIGN §6's table, written out here a second time as numbers."""

from __future__ import annotations

import pytest

from autopar.cost_models.hardware import GIB, gpu
from autopar.cost_models.memory import (
    CollectiveCounts,
    Resident,
    StageMemory,
    States,
    activation_room_bytes,
    collective_counts,
    ledger,
    optimizer_state_bytes,
    resident_bytes,
    total_bytes,
)
from autopar.errors import PlanError
from autopar.plan import Optimizer

P, D = 1000, 4
H100 = gpu("h100-sxm-80gb")


def bytes_a_parameter(zero: int, m: int, precision: str, reduce_dtype: str | None = None) -> float:
    """Parameters, masters, states and gradients."""
    stage = StageMemory(P, P, 0, 0.0, 0.0, 1)
    terms = ledger(stage, States(zero, m, D, precision, reduce_dtype=reduce_dtype), H100, D)
    return total_bytes(terms[:4]) / P


@pytest.mark.parametrize(
    ("zero", "m", "precision", "expected"),
    [
        (0, 4, "bf16", 2 + 4 + 8 + 4),
        (0, 4, "fp16", 2 + 4 + 8 + 4),
        (0, 4, "fp32", 4 + 8 + 4),
        (0, 4, "fp64", 8 + 16 + 8),
        (1, 4, "bf16", 2 + (4 + 8) / D + 4),
        (1, 1, "bf16", 2 + (4 + 8) / D + 4 / D),
        (1, 4, "fp32", 4 + (4 + 8) / D + 4),
        (2, 4, "bf16", 2 + (4 + 8 + 4) / D),
        (3, 4, "bf16", (4 + 8 + 4) / D),
        (3, 1, "fp64", (8 + 16 + 8) / D),
    ],
)
def test_states(zero: int, m: int, precision: str, expected: float) -> None:
    assert bytes_a_parameter(zero, m, precision) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("zero", "m", "expected"),
    [
        (0, 4, 2 + 4 + 8 + 4),  # once reduced they are fp32
        (1, 4, 2 + (4 + 8) / D + 2),
        (1, 1, 2 + (4 + 8) / D + 4 / D),
        (2, 4, 2 + (4 + 8 + 4) / D),
        (3, 4, (4 + 8 + 4) / D),
    ],
)
@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_gradients_reduced_in_half_precision(half: str, zero: int, m: int, expected: float) -> None:
    """Whole they are as they are reduced; shards are added up in fp32."""
    assert bytes_a_parameter(zero, m, half, half) == pytest.approx(expected)
    states = States(zero, m, D, half, reduce_dtype=half)
    assert resident_bytes(states, P).gradient_bytes == (2 * P if states.keeps_whole_gradients else 0)


def test_optimizer_states() -> None:
    assert optimizer_state_bytes(Optimizer("AdamW"), "bf16") == 8
    assert optimizer_state_bytes(Optimizer("AdamW", {"amsgrad": True}), "fp64") == 24
    assert optimizer_state_bytes(Optimizer("SGD"), "fp32") == 0
    assert optimizer_state_bytes(Optimizer("SGD", {"momentum": 0.9}), "fp32") == 4
    with pytest.raises(PlanError, match="LBFGS"):
        optimizer_state_bytes(Optimizer("LBFGS"), "fp32")


@pytest.mark.parametrize(
    ("zero", "m", "expected"),
    [
        (0, 4, CollectiveCounts(0, 0, 5)),
        (1, 4, CollectiveCounts(5, 5, 0)),
        (2, 4, CollectiveCounts(5, 20, 0)),
        (2, 1, CollectiveCounts(5, 5, 0)),
        (3, 4, CollectiveCounts(40, 20, 0)),
    ],
)
def test_collectives_of_a_step(zero: int, m: int, expected: CollectiveCounts) -> None:
    """5 units, 4 micro-batches: 5/5 and 40/20 were measured (FIELD_NOTES)."""
    assert collective_counts(zero, m, 5) == expected


@pytest.mark.parametrize(
    ("zero", "m", "expected"),
    [
        (0, 4, Resident(2 * P, 4 * P)),
        (1, 4, Resident(2 * P, 4 * P)),
        (1, 1, Resident(2 * P, 0)),
        (2, 4, Resident(2 * P, 0)),
        (3, 4, Resident(0, 0)),
    ],
)
def test_unsharded_bytes_between_micro_batches(zero: int, m: int, expected: Resident) -> None:
    assert resident_bytes(States(zero, m, D, "bf16"), P) == expected


def test_the_room_is_what_the_ledger_leaves() -> None:
    states = States(3, 8, D, "bf16")
    stage = StageMemory(10**9, 10**8, 10**7, 3e9, 2e9, 2, receives_bytes=1e8)
    room = activation_room_bytes(stage, states, H100, D, 40 * GIB)
    full = StageMemory(10**9, 10**8, 10**7, room / 4, room / 2, 2, receives_bytes=1e8)
    assert total_bytes(ledger(full, states, H100, D)) == pytest.approx(40 * GIB)


def test_pipelines_keep_a_receive_buffer_a_micro_batch() -> None:
    terms = {
        t.name: t.size_bytes for t in ledger(StageMemory(P, 0, P, 0, 0, 1, 10.0), States(0, 8, 1, "fp32"), H100, 2)
    }
    assert terms["pipeline receive buffers"] == 80
