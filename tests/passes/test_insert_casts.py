"""insert_casts: the loss in fp32."""

import pytest
import torch

from autopar.ir.graph import info
from autopar.passes.insert_casts import InsertCasts
from tests.passes.programs import assert_becomes, plan, read, typed

LOSS = """
block model:
  x: [b, 8] {dtype} = input x
  labels: [b] int = input labels
  _count: [] fp32 = buffer _count
  w: [5, 8] {dtype} = parameter w
  logits: [b, 5] {dtype} = linear(x, w)
  total: [] {dtype} = cross_entropy_loss(logits, labels, None, 2, -100)
  mean: [] {dtype} = div(total, _count)
  return mean
"""

STRATEGIES = """
model.x: -> Rp
model.labels: -> R
model._count: -> R
model.w: -> S(0)
model.logits: Rp, S(0) -> S(1)
model.total: S(1), R -> R
model.mean: R, R -> R
"""


def test_half_precision_logits_are_raised_where_they_lie() -> None:
    """N8: the shard of logits is cast, after any collective."""
    after = assert_becomes(
        InsertCasts(),
        typed(read(LOSS.format(dtype="bf16")), plan(STRATEGIES)),
        """
        block model:
          x: [b, 8] Rp = input x
          labels: [b] R = input labels
          _count: [] R = buffer _count
          w: [5, 8] S(0) = parameter w
          logits: [b, 5] S(1) = linear(x, w)
          to_dtype: [b, 5] S(1) = to(logits, torch.float32)
          total: [] R = cross_entropy_loss(to_dtype, labels, None, 2, -100)
          mean: [] R = div(total, _count)
          return mean
        """,
        plan(STRATEGIES),
    )
    raised = {n.name for n in after.blocks["model"].ops if info(n).dtype is torch.float32}
    assert raised == {"to_dtype", "total", "mean"}


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_full_precision_stays(dtype: str) -> None:
    before = typed(read(LOSS.format(dtype=dtype)), plan(STRATEGIES))
    after = InsertCasts().apply(before, plan(STRATEGIES))
    assert [n.name for n in after.blocks["model"].nodes] == [n.name for n in before.blocks["model"].nodes]
