"""spread_replicas, and conversions over dp: reduced values become the whole batch's, and the loss a summand again."""

from autopar.ir.graph import Program
from autopar.ir.ops import convert
from autopar.passes.cut_batch import CutBatch
from autopar.passes.insert_conversions import InsertConversions
from autopar.passes.lower_conversions import LowerConversions
from autopar.passes.spread_replicas import SpreadReplicas
from autopar.plan.plan import Plan
from autopar.runtime.choices import Mesh
from tests.passes.programs import assert_becomes, plan, read, typed

ROOT = """
block model:
  x: [b, 8] = input x
  _count: [] int = buffer _count
  w: [5, 8] = parameter w
  y: [b, 5] = linear(x, w)
  total: [] = sum(y)
  mean: [] = div(total, _count)
  root: [] = sqrt(mean)
  twice: [] = add(root, mean)
  return twice
"""


PENALTY = """
block model:
  x: [b, 8] = input x
  w: [5, 8] = parameter w
  y: [b, 5] = linear(x, w)
  total: [] = sum(y)
  square: [5, 8] = pow(w, 2)
  penalty: [] = sum(square)
  loss: [] = add(total, penalty)
  return loss
"""


def spread(text: str, plan: Plan) -> Program:
    return SpreadReplicas().apply(typed(read(text), plan), plan)


def _plan(dp: int, micro_batches: int = 1) -> Plan:
    return plan(tp=1).changed(mesh=Mesh(dp=dp), micro_batch=1, global_batch=dp * micro_batches)


def test_each_part_of_a_batch_adds_its_share_of_what_all_have() -> None:
    """Three micro-batches a third each, of which one replica keeps value and gradient."""
    assert_becomes(
        InsertConversions("dp"),
        spread(PENALTY, _plan(2, 3)),
        """
        block model:
          x: [b, 8] R S(0)@dp = input x
          w: [5, 8] R Rp@dp = parameter w
          y: [b, 5] R S(0)@dp = linear(x, w)
          total: [] R P@dp = sum(y)
          square: [5, 8] R Rp@dp = pow(w, 2)
          penalty: [] R Rp@dp = sum(square)
          div_tensor: [] R Rp@dp = div(penalty, 3)
          convert: [] R P@dp = convert(div_tensor, Rp, P, dp)
          loss: [] R P@dp = add(total, convert)
          return loss
        """,
        _plan(2, 3),
    )
    alone = spread(PENALTY, _plan(1, 3))
    assert [n.name for n in alone.blocks["model"].ops][-2:] == ["div_tensor", "loss"]


def test_a_number_of_the_whole_batch_is_reduced_and_the_loss_kept_on_one_rank() -> None:
    """root reads the mean of all and is whole; one replica gives it to the sum of losses, where mean is a summand."""
    typed_program = spread(ROOT, _plan(2))
    converted = assert_becomes(
        InsertConversions("dp"),
        typed_program,
        """
        block model:
          x: [b, 8] R S(0)@dp = input x
          _count: [] R R@dp = buffer _count
          w: [5, 8] R Rp@dp = parameter w
          y: [b, 5] R S(0)@dp = linear(x, w)
          total: [] R P@dp = sum(y)
          mean: [] R P@dp = div(total, _count)
          convert: [] R R@dp = convert(mean, P, R, dp)
          root: [] R R@dp = sqrt(convert)
          convert_1: [] R P@dp = convert(root, R, P, dp)
          twice: [] R P@dp = add(convert_1, mean)
          return twice
        """,
        _plan(2),
    )
    assert_becomes(
        LowerConversions(),
        converted,
        """
        block model:
          x: [b, 8] R S(0)@dp = input x
          _count: [] R R@dp = buffer _count
          w: [5, 8] R Rp@dp = parameter w
          y: [b, 5] R S(0)@dp = linear(x, w)
          total: [] R P@dp = sum(y)
          mean: [] R P@dp = div(total, _count)
          convert: [] R R@dp = all_reduce(mean, axis=dp)
          root: [] R R@dp = sqrt(convert)
          convert_1: [] R P@dp = value_from_first(root, axis=dp)
          twice: [] R P@dp = add(convert_1, mean)
          return twice
        """,
        _plan(2),
    )


def test_one_replica_needs_none() -> None:
    program = typed(read(ROOT), _plan(1))
    for step in (SpreadReplicas(), InsertConversions("dp"), CutBatch()):
        assert not any(n.target is convert for _, n in step.apply(program, _plan(1)).each_op())


def test_two_reduced_factors_need_one_reduction() -> None:
    """The product is linear in each: where one factor is whole the other stays a summand, and so does the product."""
    text = """
    block model:
      x: [b, 8] = input x
      t: [b, 5] = input t
      w: [5, 8] = parameter w
      y: [b, 5] = linear(x, w)
      share: [5] = sum.dim_IntList(t, [0])
      mean: [5] = sum.dim_IntList(y, [0])
      both: [5] = mul(share, mean)
      loss: [] = sum(both)
      return loss
    """
    assert_becomes(
        InsertConversions("dp"),
        spread(text, _plan(2)),
        """
        block model:
          x: [b, 8] R S(0)@dp = input x
          t: [b, 5] R S(0)@dp = input t
          w: [5, 8] R Rp@dp = parameter w
          y: [b, 5] R S(0)@dp = linear(x, w)
          share: [5] R P@dp = sum(t, [0])
          mean: [5] R P@dp = sum(y, [0])
          convert: [5] R R@dp = convert(share, P, R, dp)
          both: [5] R P@dp = mul(convert, mean)
          loss: [] R P@dp = sum(both)
          return loss
        """,
        _plan(2),
    )
