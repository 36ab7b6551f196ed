"""shard_parameters: the plan's strategies, written into the nodes."""

import pytest

from autopar.errors import PlanError
from autopar.passes.shard_parameters import ShardParameters
from tests.passes.programs import assert_becomes, plan

LINEAR = """
block model:
  x: [b, 8] = input x
  w: [4, 8] = parameter w
  y: [b, 4] = linear(x, w)
  return y
"""


def test_each_node_gets_its_strategy() -> None:
    assert_becomes(
        ShardParameters(),
        LINEAR,
        """
        block model:
          x: [b, 8] R = input x
          w: [4, 8] S(0) = parameter w
          y: [b, 4] S(1) = linear(x, w)
          return y
        """,
        plan("model.x: -> R\nmodel.w: -> S(0)\nmodel.y: R, S(0) -> S(1)"),
    )


def test_on_one_rank_everything_is_whole() -> None:
    assert_becomes(
        ShardParameters(),
        LINEAR,
        """
        block model:
          x: [b, 8] R = input x
          w: [4, 8] R = parameter w
          y: [b, 4] R = linear(x, w)
          return y
        """,
        plan(tp=1),
    )


def test_a_plan_of_another_model_is_refused() -> None:
    """Q5: a saved plan meets a model that has changed."""
    with pytest.raises(PlanError, match=r"no placement for model\.y: it was made for another model or version"):
        assert_becomes(ShardParameters(), LINEAR, "", plan("model.x: -> R\nmodel.w: -> S(0)"))
