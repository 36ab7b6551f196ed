"""insert_recompute: the plan's layers, checked."""

import pytest

from autopar.errors import PlanError
from autopar.passes.insert_recompute import InsertRecompute
from autopar.plan.recompute import whole_layers
from tests.passes.programs import plan, read

LAYERS = """
block Layer:
  x: [b, s, 8] = value 0
  y: [b, s, 8] = relu(x)
  return y

y1 = Layer(y0)  # layers.0
y2 = Layer(y1)  # layers.1
"""


def test_the_plans_layers_are_marked() -> None:
    before = read(LAYERS)
    after = InsertRecompute().apply(before, plan(recompute=whole_layers((1,))))
    assert not before.recompute
    assert after.recompute == whole_layers((1,))


def test_no_layers_are_marked_by_default() -> None:
    assert InsertRecompute().apply(read(LAYERS), plan()).recompute == ()


def test_layers_that_are_not_there_are_refused() -> None:
    with pytest.raises(PlanError, match=r"recompute names layers \[-1, 2\], but Model has layers 0 to 1"):
        InsertRecompute().apply(read(LAYERS), plan(recompute=whole_layers((0, 2, -1))))
