"""read_masks: masks that are proven to be causal. What is proven: tests/unit/ir/test_masks.py."""

import pytest

from autopar.passes.read_masks import ReadMasks
from tests.passes.programs import assert_becomes

_BEFORE = """
block model:
  q: [b, 2, s, 4] = parameter q
  p: [s] int = arange(s)
  i: [s, 1] int = unsqueeze(p, 1)
  j: [1, s] int = unsqueeze(p, 0)
  m: [s, s] bool = {mask}
  a: [b, 2, s, 4] = scaled_dot_product_attention(q, q, q, m, {dropout}, False, scale=0.5)
  return a
"""


def test_a_plain_causal_mask_goes() -> None:
    assert_becomes(
        ReadMasks(),
        _BEFORE.format(mask="le.Tensor(j, i)", dropout=0.1),
        """
        block model:
          q: [b, 2, s, 4] = parameter q
          a: [b, 2, s, 4] = scaled_dot_product_attention(q, q, q, None, 0.1, True, scale=0.5)
          return a
        """,
    )


def test_a_mask_that_hides_nothing_goes() -> None:
    assert_becomes(
        ReadMasks(),
        _BEFORE.format(mask="ge.Scalar(i, 0)", dropout=0.1).replace("m: [s, s]", "m: [s, 1]"),
        """
        block model:
          q: [b, 2, s, 4] = parameter q
          a: [b, 2, s, 4] = scaled_dot_product_attention(q, q, q, None, 0.1, False, scale=0.5)
          return a
        """,
    )


def test_a_window_is_known_and_its_mask_stays() -> None:
    assert_becomes(
        ReadMasks(),
        """
        block model:
          q: [b, 2, s, 4] = parameter q
          p: [s] int = arange(s)
          i: [s, 1] int = unsqueeze(p, 1)
          j: [1, s] int = unsqueeze(p, 0)
          le: [s, s] bool = le.Tensor(j, i)
          m: [s, s] bool = triu(le, -4)
          a: [b, 2, s, 4] = scaled_dot_product_attention(q, q, q, m, scale=0.5)
          return a
        """,
        """
        block model:
          q: [b, 2, s, 4] = parameter q
          p: [s] = arange(s)
          i: [s, 1] = unsqueeze(p, 1)
          j: [1, s] = unsqueeze(p, 0)
          le: [s, s] = le(j, i)
          m: [s, s] = triu(le, -4)
          a: [b, 2, s, 4] = scaled_dot_product_attention(q, q, q, m, scale=0.5)  # window=5
          return a
        """,
    )


@pytest.mark.parametrize("mask", ["lt.Tensor(j, i)", "ge.Tensor(j, i)"])
def test_another_mask_stays_as_it_is(mask: str) -> None:
    before = _BEFORE.format(mask=mask, dropout=0.0)
    after = before.replace(" int =", " =").replace(" bool =", " =").replace(".Tensor", "")
    assert_becomes(ReadMasks(), before, after)
