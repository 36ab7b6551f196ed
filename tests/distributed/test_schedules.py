"""Every schedule trains as one process does: pp 2 and 4, virtual stages, with 1, pp and 3·pp micro-batches.

fp64, five AdamW steps, every quantity to 1e-9 on every rank. `make test` covers schedule × pp × m pairwise, the rest
is slow.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.errors import PlanError
from autopar.plan.schedules import MULTI_STAGE
from autopar.search.layouts import MEGATRON_SP
from tests.distributed.families import family
from tests.distributed.half import assert_half
from tests.distributed.programs import (
    GLOBAL_BATCH,
    Subject,
    assert_parity,
    gpt,
    llama,
)
from tests.distributed.test_reused_layers import SAMPLES, reused

LAYERS = 8
KINDS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2)]
CASES = [
    (*kind, pp, m) for kind in KINDS for pp in (2, 4) for m in (1, pp, 3 * pp) if not (kind[0] == "1f1b" and m == 1)
]
QUICK = {
    ("interleaved", 2, 2, 6), ("interleaved", 2, 2, 1), ("interleaved", 2, 4, 4),
    ("zero-bubble", 1, 2, 6), ("zero-bubble", 1, 4, 1), ("zero-bubble", 2, 2, 2), ("zero-bubble", 2, 4, 12),
    ("1f1b", 1, 4, 12), ("gpipe", 1, 2, 1),
}  # fmt: skip


def slow_unless(quick: set[Any], case: Any) -> Any:
    return pytest.param(*case, marks=[] if case in quick else [pytest.mark.slow])


def pipeline(subject: Subject, schedule: str, v: int, pp: int, m: int = 0, **more: Any) -> Any:
    """The plan with m micro-batches (default: pp)."""
    more = {"micro_batch": GLOBAL_BATCH // (m or pp) // more.get("dp", 1), **more}
    return subject.plan(pp=pp, schedule=schedule, virtual_stages=v, **more)


@pytest.mark.parametrize(("schedule", "v", "pp", "m"), [slow_unless(QUICK, case) for case in CASES])
def test_parity(schedule: str, v: int, pp: int, m: int) -> None:
    """nanoGPT with tied embeddings and fused projections."""
    subject = gpt(torch.float64, LAYERS)
    assert_parity(subject, pipeline(subject, schedule, v, pp, m))


@pytest.mark.parametrize("pp", [2, 4])
def test_what_is_not_legal_is_refused(pp: int) -> None:
    subject = gpt(torch.float64, LAYERS)
    with pytest.raises(PlanError, match=f"1 < pp={pp}; use schedule='gpipe'"):
        pipeline(subject, "1f1b", 1, pp, 1)
    with pytest.raises(PlanError, match="interleaved is for virtual_stages of 2 or more"):
        pipeline(subject, "interleaved", 1, pp)
    with pytest.raises(PlanError, match="has one stage a rank, not virtual_stages=2"):
        pipeline(subject, "gpipe", 2, pp)
    with pytest.raises(PlanError, match="zero-bubble with zero=3: .* use zero=0 or 1"):
        pipeline(subject, "zero-bubble", 1, pp, 1, dp=2, zero=3)
    with pytest.raises(PlanError, match="zero-bubble with recompute: .* use recompute none"):
        pipeline(subject, "zero-bubble", 1, pp, recompute="all")


# --------------------------------------------------------------------------------
# With the other strategies

MIXES: dict[str, dict[str, Any]] = {
    "tp2-sp": {"tp": 2, "layout": MEGATRON_SP},
    "dp2-zero0": {"dp": 2},
    "dp2-zero1": {"dp": 2, "zero": 1},
    "dp2-zero2": {"dp": 2, "zero": 2},
    "dp2-zero3-recompute": {"dp": 2, "zero": 3, "recompute": "all"},
    "dp2-tp2-zero1": {"dp": 2, "tp": 2, "zero": 1},
}
HALVES = ("tp2-sp", "dp2-zero0", "dp2-zero1", "dp2-tp2-zero1")  # what zero-bubble goes with
MIXED = [("interleaved", 2, name) for name in MIXES] + [("zero-bubble", v, name) for v in (1, 2) for name in HALVES]
QUICK_MIXED = {
    ("interleaved", 2, "dp2-zero3-recompute"), ("interleaved", 2, "tp2-sp"), ("interleaved", 2, "dp2-zero2"),
    ("zero-bubble", 1, "dp2-zero1"), ("zero-bubble", 2, "dp2-tp2-zero1"),
}  # fmt: skip


@pytest.mark.parametrize(("schedule", "v", "mix"), [slow_unless(QUICK_MIXED, case) for case in MIXED])
def test_parity_with_other_strategies(schedule: str, v: int, mix: str) -> None:
    subject = llama(torch.float64)
    assert_parity(subject, pipeline(subject, schedule, v, 2, 6 if "dp" not in mix else 2, **MIXES[mix]))


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("schedule", "v"), [("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2)])
@pytest.mark.parametrize("zero", [0, 1])
def test_bf16_gradients_add_up_in_fp32(schedule: str, v: int, zero: int) -> None:
    subject = llama(torch.bfloat16)
    assert_half(subject, pipeline(subject, schedule, v, 2, 6, dp=2, zero=zero))


# --------------------------------------------------------------------------------
# Other models

FAMILY_CASES = [
    (name, schedule, v, pp)
    for name, stages in (("t5", (2, 3)), ("unet", (2, 3)), ("whisper", (2,)))
    for schedule, v in (("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2), ("1f1b", 1))
    for pp in stages
]
QUICK_FAMILIES = {
    ("t5", "interleaved", 2, 3), ("t5", "zero-bubble", 2, 2), ("unet", "interleaved", 2, 3),
    ("unet", "zero-bubble", 1, 3), ("whisper", "zero-bubble", 2, 2),
}  # fmt: skip


@pytest.mark.parametrize(("name", "schedule", "v", "pp"), [slow_unless(QUICK_FAMILIES, case) for case in FAMILY_CASES])
def test_values_that_are_read_several_stages_later(name: str, schedule: str, v: int, pp: int) -> None:
    """Encoder-decoders and skips; a decoder's first stage computes on labels alone, of which nothing is received."""
    subject = family(name, torch.float64)
    if len(subject.program.layer_calls) < pp * v:
        with pytest.raises(PlanError, match="has no layers"):
            subject.source(pipeline(subject, schedule, v, pp))
        return
    assert_parity(subject, pipeline(subject, schedule, v, pp))


@pytest.mark.parametrize("schedule", MULTI_STAGE)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_that_several_stages_of_a_rank_use(schedule: str, frozen: bool) -> None:
    """Each has a copy, and the copies stay equal; one name is saved."""
    made = reused(frozen)
    assert_parity(
        made, made.plan(pp=2, schedule=schedule, virtual_stages=2, micro_batch=2, global_batch=SAMPLES, sequence=8)
    )
