"""What describe counts of a traced program."""

from __future__ import annotations

import pytest
import torch

from autopar.compiler import prepare
from autopar.cost_models.describe import describe
from autopar.ir.graph import B, S
from autopar.search.layouts import replicated
from examples.gpt import GPTConfig, build
from tests.models import VOCABULARY

CONFIG = GPTConfig(vocab_size=VOCABULARY, n_layer=1, n_head=2, d_model=32)
VALUES = {B: 2, S: 16}


def kept_by_the_epilogue(precision: str) -> float:
    ids = torch.zeros(2, 16, dtype=torch.long)
    program = prepare(build(CONFIG), {"input_ids": ids, "labels": ids}, precision)
    costs = describe(program, replicated(program), VALUES)
    return float(costs.epilogue.saved_bytes.subs(VALUES))


@pytest.mark.parametrize(("precision", "itemsize"), [("bf16", 2), ("fp32", 4)])
def test_logits_are_kept_in_fp32(precision: str, itemsize: int) -> None:
    """N8: bf16 logits are cast at the loss, so fp32 is what backward keeps. Beside them: norm input and output."""
    tokens, d = 2 * 16, 32
    norm = 2 * itemsize * tokens * d + 2 * 4 * tokens
    expected = 4 * tokens * VOCABULARY + norm
    assert kept_by_the_epilogue(precision) == pytest.approx(expected, abs=4)  # and the loss itself
