"""The ledger against DESIGN §6's table, written out here a second time as numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost_models.hardware import GIB, Hardware, gpu
from autopar.cost_models.memory import activation_room_bytes, host_ledger, ledger, total_bytes
from autopar.cost_models.stage_memory import StageMemory
from autopar.cost_models.states import States, optimizer_state_bytes
from autopar.errors import PlanError
from autopar.plan.plan import Optimizer
from tests.zero_table import CollectiveCounts, Resident, collective_counts, resident_bytes

P, D = 1000, 4
H100 = gpu("h100-sxm-80gb")


def bytes_a_parameter(zero: int, m: int, precision: str, reduce_dtype: str | None = None) -> float:
    """Parameters, masters, states and gradients."""
    stage = StageMemory(P, P, (), 0.0, 0.0, 1)
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


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("m", [1, 4])
def test_one_data_rank_in_whole_precision_has_plain_parameters(zero: int, m: int) -> None:
    """They are the masters: no copy, nothing gathered, no buffer. In half precision they are shards of one."""
    stage = StageMemory(P, P, (P,), 0.0, 0.0, 1)
    plain, half = (
        {t.name: t.size_bytes for t in ledger(stage, States(zero, m, 1, precision), H100, 1)}
        for precision in ("fp32", "bf16")
    )
    assert sum(plain.values()) - plain["context, communicators"] == P * (4 + 8 + 4) * (1 + H100.allocator_slack)
    assert resident_bytes(States(zero, m, 1, "fp32"), P).parameter_bytes == 4 * P
    assert half["parameters (bf16 copy)"] + half["gathered units"] >= 2 * P
    assert half["reduction buffers"] == P * (2 + 4)


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
    stage = StageMemory(10**9, 10**8, (10**7, 10**7), 3e9, 2e9, 2, receives_bytes=1e8)
    room = activation_room_bytes(stage, states, H100, D, 40 * GIB)
    full = StageMemory(10**9, 10**8, (10**7, 10**7), room / 4, room / 2, 2, receives_bytes=1e8)
    assert total_bytes(ledger(full, states, H100, D)) == pytest.approx(40 * GIB)


def test_pipelines_keep_a_receive_buffer_a_micro_batch() -> None:
    terms = {
        t.name: t.size_bytes for t in ledger(StageMemory(P, 0, (P,), 0, 0, 1, 10.0), States(0, 8, 1, "fp32"), H100, 2)
    }
    assert terms["pipeline receive buffers"] == 80


# --------------------------------------------------------------------------------
# Groups of hsdp, and offload


def by_name(states: States, hardware: Hardware = H100) -> dict[str, float]:
    """Bytes of the first four terms a parameter, without what follows the names."""
    terms = ledger(StageMemory(P, P, (), 0.0, 0.0, 1), states, hardware, D)[:4]
    return {term.name.split(",")[0].split(" (on")[0]: term.size_bytes / P for term in terms}


def test_a_group_of_hsdp_shares_out_one_copy() -> None:
    """Of 8 data ranks in groups of 4, each holds a fourth."""
    terms = by_name(States(3, 4, 4, "bf16", copies=2))
    assert terms == {"parameters (bf16 copy)": 0, "master weights": 1, "AdamW states": 2, "gradients": 1}


@pytest.mark.parametrize(
    ("zero", "m", "copies", "copy", "gradients"),
    [
        (1, 1, 1, 2, 0),  # reduced at once, and away
        (1, 4, 1, 2, 4),  # whole until the last micro-batch
        (2, 4, 1, 2, 0),
        (3, 4, 1, 0, 0),
        (3, 4, 2, 0, 4 / D),  # until the groups of hsdp add theirs
        (3, 1, 2, 0, 0),
    ],
)
def test_offload_leaves_the_device_the_copy_and_what_waits(
    zero: int, m: int, copies: int, copy: float, gradients: float
) -> None:
    states = States(zero, m, D, "bf16", copies=copies, offload=True)
    terms = by_name(states)
    assert terms == {
        "parameters (bf16 copy)": copy,
        "master weights": 0,
        "AdamW states": 0,
        "gradients": gradients,
    }
    host = host_ledger(StageMemory(P, P, (), 0.0, 0.0, 1), states, H100)
    assert total_bytes(host) == pytest.approx(P / D * ((4 + 8 + 4) + 0.44 * (4 + 4)))


def test_offload_moves_nothing_where_the_device_is_the_host() -> None:
    here = replace(H100, host=None)
    kept, offloaded = (by_name(States(2, 4, D, "fp32", offload=offload), here) for offload in (False, True))
    assert kept == offloaded
    assert host_ledger(StageMemory(P, P, (), 0.0, 0.0, 1), States(2, 4, D, "fp32", offload=True), here) == ()


def test_groups_reduce_between_each_other_once_a_step() -> None:
    assert collective_counts(2, 4, 5, copies=2) == CollectiveCounts(5, 20, 5)
    assert collective_counts(3, 4, 5, copies=2) == CollectiveCounts(40, 20, 5)


@pytest.mark.parametrize(
    ("root", "units", "gathered", "largest"),
    [
        (0, (700, 200, 200, 500), 900, 700),  # the embedding with the first layer
        (0, (300, 200, 200, 500), 700, 500),  # the last layer with the head
        (700, (0, 200, 200, 10), 1100, 700),  # a tied embedding stays whole
        (0, (0, 200, 200, 0), 400, 200),  # a stage in the middle
        (0, (), 0, 0),
    ],
)
def test_z11_the_gathered_units_and_the_largest_reduction(
    root: int, units: tuple[int, ...], gathered: int, largest: int
) -> None:
    """Z11: embedding and head are units of their own, and each is a bucket of its own."""
    stage = StageMemory(5000, root, units, 0.0, 0.0, 1)
    terms = {term.name: term.size_bytes for term in ledger(stage, States(3, 4, D, "bf16"), H100, D)}
    assert terms["gathered units"] == 2 * gathered
    assert terms["reduction buffers"] == (2 + 4) * largest
