"""cut_batch: where samples are gathered over the replicas, sizes of the whole batch are those of all replicas."""

import pytest

from autopar.errors import PlanError
from autopar.ir.graph import Program
from autopar.passes.cut_batch import CutBatch
from autopar.passes.insert_conversions import InsertConversions
from autopar.passes.spread_replicas import SpreadReplicas
from autopar.plan.plan import Plan
from autopar.rules.spread import data_types
from autopar.runtime.choices import Mesh
from tests.passes.programs import assert_becomes, plan, read, typed

IN_BATCH = """
block model:
  x: [b, 8] = input x
  y: [b, 8] = input y
  w: [4, 8] = parameter w
  one: [b, 4] = linear(x, w)
  other: [b, 4] = linear(y, w)
  t: [4, b] = transpose.int(other, 0, 1)
  logits: [b, b] = matmul(one, t)
  places: [b] int = arange(b)
  loss: [] = cross_entropy_loss(logits, places, None, 2)
  return loss
"""


def _plan(dp: int, micro_batches: int = 1) -> Plan:
    return plan(tp=1).changed(mesh=Mesh(dp=dp), micro_batch=1, global_batch=dp * micro_batches)


def _converted(text: str, plan: Plan) -> Program:
    program = SpreadReplicas().apply(typed(read(text), plan), plan)
    return InsertConversions("dp").apply(program, plan)


def test_the_samples_of_all_replicas_are_compared_with_a_replicas_own() -> None:
    """Each replica's loss is that of its rows over all columns; its places are those of its rows among all."""
    assert_becomes(
        CutBatch(),
        _converted(IN_BATCH, _plan(2)),
        """
        block model:
          x: [b, 8] R S(0)@dp = input x
          y: [b, 8] R S(0)@dp = input y
          w: [4, 8] R Rp@dp = parameter w
          one: [b, 4] R S(0)@dp = linear(x, w)
          other: [b, 4] R S(0)@dp = linear(y, w)
          t: [4, b] R S(1)@dp = transpose(other, 0, 1)
          convert: [4, 2*b] R Rp@dp = convert(t, S(1), Rp, dp)
          logits: [b, 2*b] R S(0)@dp = matmul(one, convert)
          places: [2*b] R R@dp = arange(2*b)
          convert_1: [b] R S(0)@dp = convert(places, R, S(0), dp)
          loss: [] R P@dp = cross_entropy_loss(logits, convert_1, None, 2)
          return loss
        """,
        _plan(2),
    )


def test_one_replica_and_independent_samples_stay_as_they_are() -> None:
    alone = _converted(IN_BATCH, _plan(1))
    assert CutBatch().apply(alone, _plan(1)) is alone
    apart = IN_BATCH.replace("matmul(one, t)", "linear(one, w2)").replace("[b, b]", "[b, 5]")
    apart = apart.replace("  w: [4", "  w2: [5, 4] = parameter w2\n  w: [4").replace("int = arange(b)", "int = input p")
    spread = _converted(apart, _plan(2))
    assert CutBatch().apply(spread, _plan(2)) is spread


def test_micro_batches_do_not_exchange_samples() -> None:
    coupling = data_types(read(IN_BATCH)).coupling
    assert coupling is not None and coupling.replicas
    with pytest.raises(
        PlanError, match="2 micro-batches would not compute the model(.|\n)*micro_batch=global_batch/dp"
    ):
        SpreadReplicas().apply(typed(read(IN_BATCH), _plan(2, 2)), _plan(2, 2))


def test_the_size_of_the_batch_is_that_of_all_replicas() -> None:
    text = """
    block model:
      x: [b, 8] = input x
      total: [] = sum(x)
      mean: [] = div(total, b)
      root: [] = sqrt(mean)
      return root
    """
    program = CutBatch().apply(_converted(text, _plan(2)), _plan(2))
    (mean,) = (node for _, node in program.each_op() if node.name == "mean")
    assert str(mean.args[1]) == "2*b"
