"""Faults of pipelines that a schedule decides: too few micro-batches (P5), several work handles (P7)."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import PlanError
from tests.distributed.programs import GLOBAL_BATCH, assert_parity, gpt


@pytest.mark.parametrize("pp", [2, 4])
def test_p5_one_micro_batch_over_several_stages(pp: int) -> None:
    """P5, P7: GPipe runs with fewer micro-batches than stages; over gloo, whose sends are several handles."""
    model = gpt(torch.float64)
    assert_parity(model, model.plan(pp=pp, micro_batch=GLOBAL_BATCH, schedule="gpipe"))


def test_p5_1f1b_with_too_few_micro_batches_is_refused_with_the_reason() -> None:
    model = gpt(torch.float64)
    with pytest.raises(PlanError, match=r"1 < pp=4; use schedule='gpipe', a smaller micro_batch or fewer stages"):
        model.plan(pp=4, micro_batch=GLOBAL_BATCH, schedule="1f1b")
