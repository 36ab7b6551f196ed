"""The contract: an emitted program trains as the original does on one process, compared on every rank.

fp64: loss, every gradient, total norm and weights over 5 AdamW steps to 1e-9. fp32: 5 steps of SGD with momentum,
to 1e-5. bf16, fp16: the error against fp32 is at most twice that of the original in the same dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autopar.search.layouts import MEGATRON_SP
from tests.distributed.half import assert_half
from tests.distributed.programs import (
    Subject,
    assert_parity,
    gpt,
    llama,
    qwen,
)

Make = Callable[[torch.dtype], Subject]

# A third of the samples is all padding: whole micro-batches, and with dp4 whole ranks.
PLANS: dict[str, dict[str, Any]] = {
    "dp4": {"dp": 4, "micro_batch": 3},
    "tp2": {"tp": 2},
    "tp2-sp": {"tp": 2, "layout": MEGATRON_SP},
    "pp2-gpipe": {"pp": 2, "schedule": "gpipe"},
    "pp2-1f1b": {"pp": 2},
    "pp3-uneven": {"pp": 3},  # 4 layers: 2, 1, 1
    "dp2-tp2-pp2": {"dp": 2, "tp": 2, "pp": 2, "micro_batch": 3},
    "zero1": {"dp": 2, "micro_batch": 3, "zero": 1},
    "zero2": {"dp": 2, "micro_batch": 3, "zero": 2},
    "zero3": {"dp": 2, "micro_batch": 3, "zero": 3},
    "recompute": {"recompute": (1, 2)},
    "accumulation3": {"dp": 2, "micro_batch": 2},
    "zero3-tp2-pp2-recompute": {"dp": 2, "tp": 2, "pp": 2, "micro_batch": 3, "zero": 3, "recompute": "all"},
}
OF_QWEN = ("tp2-sp", "dp2-tp2-pp2", "zero3-tp2-pp2-recompute")
IN_HALF = ("tp2-sp", "zero3", "dp2-tp2-pp2")
MODELS: dict[str, Make] = {"gpt": gpt, "llama": llama, "qwen2": qwen}
CASES = [(model, plan) for model in MODELS for plan in PLANS if model != "qwen2" or plan in OF_QWEN]
# Other dtypes than fp64 take every other plan or fewer, with one model each, in turn; the rest of the product is slow.
IN_FP32 = [("gpt" if i % 2 else "llama", plan) for i, plan in enumerate(PLANS) if i % 3 == 0] + [("qwen2", "tp2-sp")]
IN_FP16 = [("gpt", "tp2"), ("llama", "pp2-1f1b"), ("gpt", "zero2"), ("llama", "zero3-tp2-pp2-recompute")]
IN_BF16 = [("gpt", "tp2-sp"), ("llama", "zero3"), ("gpt", "dp2-tp2-pp2")]


def _each(cases: list[tuple[str, str]], quick: list[tuple[str, str]]) -> pytest.MarkDecorator:
    assert set(quick) <= set(cases)
    marked = [pytest.param(*case, marks=[] if case in quick else [pytest.mark.slow]) for case in cases]
    return pytest.mark.parametrize(("model", "plan"), marked)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("model", "plan"), CASES)
def test_fp64(model: str, plan: str) -> None:
    subject = MODELS[model](torch.float64)
    assert_parity(subject, subject.plan(**PLANS[plan]))


@_each(CASES, IN_FP32)
def test_fp32(model: str, plan: str) -> None:
    subject = MODELS[model](torch.float32)
    assert_parity(subject, subject.plan(**PLANS[plan]))


# --------------------------------------------------------------------------------
# Half precision


@_each([(model, plan) for model in ("gpt", "llama") for plan in IN_HALF], IN_BF16)
def test_bf16(model: str, plan: str) -> None:
    subject = MODELS[model](torch.bfloat16)
    assert_half(subject, subject.plan(**PLANS[plan]))


@_each([(model, plan) for model in ("gpt", "llama") for plan in PLANS], IN_FP16)
def test_fp16(model: str, plan: str) -> None:
    subject = MODELS[model](torch.float16)
    assert_half(subject, subject.plan(**PLANS[plan]))


@pytest.mark.parametrize(
    ("dtype", "zero"),
    [
        pytest.param(dtype, zero, id=f"{name}-{zero}", marks=[] if (zero + i) % 2 else [pytest.mark.slow])
        for i, (name, dtype) in enumerate((("bf16", torch.bfloat16), ("fp16", torch.float16)))
        for zero in range(4)
    ],
)
def test_gradients_reduced_in_half_precision(dtype: torch.dtype, zero: int) -> None:
    subject = gpt(dtype)
    assert_half(subject, subject.plan(dp=2, micro_batch=3, zero=zero, reduce_dtype=subject.precision))
