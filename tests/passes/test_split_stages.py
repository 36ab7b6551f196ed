"""split_stages: every layer in one stage, and what passes between stages."""

import pytest

from autopar.errors import PlanError
from autopar.ir.graph import Stage
from autopar.passes.split_stages import SplitStages
from tests.passes.programs import plan, read

# Three layers; the last also reads what the prologue made, and all read a table.
LAYERS = """
block tables:
  ids: [b, s] int = input ids
  t: [b, s, 8] = to(ids, torch.float64)
  return t

block prologue:
  ids: [b, s] int = input ids
  w: [5, 8] = parameter w
  y: [b, s, 8] = embedding(w, ids)
  return y

block Layer:
  x: [b, s, 8] = value 0
  t: [b, s, 8] = value 1
  y: [b, s, 8] = add(x, t)
  return y

block Last:
  x: [b, s, 8] = value 0
  skip: [b, s, 8] = value 1
  y: [b, s, 8] = add(x, skip)
  return y

block epilogue:
  x: [b, s, 8] = value 0
  y: [] = sum(x)
  return y

t = tables()
h = prologue()
h1 = Layer(h, t)  # layers.0
h2 = Layer(h1, t)  # layers.1
h3 = Last(h2, h)  # layers.2
loss = epilogue(h3)
"""


def _stages(*stages: tuple[int, int]) -> tuple[Stage, ...]:
    return SplitStages().apply(read(LAYERS), plan(stages=stages)).stages


def test_one_stage_passes_nothing() -> None:
    assert _stages((0, 3)) == (Stage(0, 3),)


def test_a_value_read_several_stages_later_is_sent_on() -> None:
    """P6: a skip link travels through the stage between; a table is made anew by each stage."""
    assert _stages((0, 1), (1, 2), (2, 3)) == (
        Stage(0, 1, (), ("h", "h1")),
        Stage(1, 2, ("h", "h1"), ("h", "h2")),
        Stage(2, 3, ("h", "h2"), ()),
    )


def test_layers_need_not_divide() -> None:
    """P3"""
    assert _stages((0, 1), (1, 3)) == (Stage(0, 1, (), ("h", "h1")), Stage(1, 3, ("h", "h1"), ()))


def test_ends_belong_to_the_first_and_the_last_stage_and_tables_to_all() -> None:
    program = SplitStages().apply(read(LAYERS), plan(stages=((0, 1), (1, 3))))
    made = {call.outputs or "loss": list(program.stage_of_call(call)) for call in program.calls}
    assert made == {("t",): [0, 1], ("h",): [0], ("h1",): [0], ("h2",): [1], ("h3",): [1], "loss": [1]}


@pytest.mark.parametrize(
    "stages", [((0, 1), (1, 2)), ((0, 2), (1, 3)), ((0, 1), (2, 3)), ((0, 1), (1, 4)), ((1, 2), (2, 3))]
)
def test_stages_that_do_not_hold_each_layer_once_are_refused(stages: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(PlanError, match="do not hold each of the 3 layers of Model exactly once, .*give 2 consecutive"):
        _stages(*stages)


def test_a_model_without_layers_is_one_stage_of_none() -> None:
    whole = read("block epilogue:\n  x: [b] = input x\n  loss: [] = sum(x)\n  return loss\n\nloss = epilogue()")
    assert SplitStages().apply(whole, plan(stages=((0, 0),))).stages == (Stage(0, 0),)
    with pytest.raises(PlanError, match="no layers to spread"):
        SplitStages().apply(whole, plan(stages=((0, 0), (0, 0))))
