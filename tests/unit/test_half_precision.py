"""fp16 and the dtype of reductions, from the request to the saved plan and program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import PlanError
from autopar.plan.plan import Plan
from examples.gpt import GPT, GPTConfig

IDS = torch.zeros(2, 16, dtype=torch.long)
ON: dict[str, Any] = {
    "gpu": "h100-sxm-80gb",
    "inputs": {"input_ids": IDS, "labels": IDS},
    "global_batch": 8,
    "dp": 2,
    "tp": 1,
    "pp": 1,
    "zero": 2,
    "micro_batch": 1,
}


def planned(**options: Any) -> Any:
    model = GPT(GPTConfig(vocab_size=96, n_layer=2, n_head=2, d_model=16, block_size=16))
    return autopar.parallelize(model, 2, **ON, **options)


def test_fp16_with_its_reduction_from_the_request_to_the_program(tmp_path: Path) -> None:
    result = planned(precision="fp16", reduce_dtype="fp16")
    assert "fp16, gradients summed in fp16" in str(result)
    assert "unscaling of gradients" in result.explain() and "in fp32: the loss" in result.explain()
    source = result.source()
    assert 'precision="fp16"' in source and 'reduce_dtype="fp16"' in source
    assert "fp16 (gradients summed in fp16)" in source and "# in fp32: loss" in source
    result.plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == result.plan
    assert result.compare(zero=1)


def test_without_a_pin_gradients_are_summed_in_fp32() -> None:
    result = planned(precision="fp16")
    assert result.plan.compute.reduce_dtype is None and "reduce_dtype" not in result.plan.to_dict()
    assert "reduce_dtype" not in result.source() and "summed in" not in str(result)


@pytest.mark.parametrize(
    ("precision", "reduce_dtype", "legal"), [("fp16", "bf16", "fp32 or fp16"), ("fp64", "fp32", "fp64")]
)
def test_other_reductions_are_refused(precision: str, reduce_dtype: str, legal: str) -> None:
    with pytest.raises(PlanError, match=f"reduce_dtype='{reduce_dtype}' with precision='{precision}': use {legal}"):
        planned(precision=precision, reduce_dtype=reduce_dtype)


def test_the_reduction_is_not_searched() -> None:
    with pytest.raises(PlanError, match="forbid='reduce_dtype'"):
        planned(forbid={"reduce_dtype": ["fp32"]})
