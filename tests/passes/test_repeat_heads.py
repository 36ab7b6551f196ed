"""repeat_heads: as many K/V heads as ranks that share them out."""

import pytest

from autopar.passes.repeat_heads import RepeatHeads
from tests.passes.programs import assert_becomes, context_plan, read

_BEFORE = """
block Layer:
  q: [b, 8, s, 4] = value 0
  k: [b, 2, s, 4] = value 1
  v: [b, 2, s, 4] = value 2
  a: [b, 8, s, 4] = scaled_dot_product_attention(q, k, v, None, 0.0, True, enable_gqa=True)
  return a

y1 = Layer(q0, k0, v0)  # layers.0
"""


def test_each_head_is_repeated_as_often_as_it_takes() -> None:
    expected = """
    block Layer:
      q: [b, 8, s, 4] = value 0
      k: [b, 2, s, 4] = value 1
      v: [b, 2, s, 4] = value 2
      k_repeated: [b, 4, s, 4] = repeat_interleave(k, 2, 1)
      v_repeated: [b, 4, s, 4] = repeat_interleave(v, 2, 1)
      a: [b, 8, s, 4] = scaled_dot_product_attention(q, k_repeated, v_repeated, None, 0.0, True, enable_gqa=True)
      return a

    y1 = Layer(q0, k0, v0)  # layers.0
    """  # noqa: E501
    assert_becomes(RepeatHeads(), _BEFORE, expected, context_plan(cp=4, layout="ulysses"))
    assert_becomes(RepeatHeads(), _BEFORE, expected, context_plan(cp=2, tp=2, layout="ulysses"))


@pytest.mark.parametrize(("cp", "layout"), [(2, "ulysses"), (4, "ring"), (1, "ulysses"), (3, "ulysses")])
def test_nothing_is_repeated_where_it_does_not_help(cp: int, layout: str) -> None:
    program = read(_BEFORE)
    sequence = 12 if cp == 3 else 8
    assert_becomes(RepeatHeads(), program, _BEFORE, context_plan(cp=cp, layout=layout, sequence=sequence))
