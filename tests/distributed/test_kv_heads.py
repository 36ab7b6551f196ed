"""S3: more ranks than K/V heads. Each rank reads one of them; their gradients are summed."""

from __future__ import annotations

import pytest
import torch

from autopar.search.layouts import MEGATRON, MEGATRON_SP, Layout
from tests import models
from tests.distributed.programs import assert_parity, subject


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(("groups", "layout"), [(2, MEGATRON), (1, MEGATRON_SP)])
def test_four_ranks_read_fewer_heads(groups: int, layout: Layout) -> None:
    model, program = models.llama(
        torch.float64, hidden_size=64, intermediate_size=72, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=groups,
    )  # fmt: skip
    case = subject(model, torch.float64, program)
    plan = case.plan(tp=4, layout=layout)
    assert plan.solution is not None
    assert_parity(case, plan)
