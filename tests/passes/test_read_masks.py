"""read_masks: masks that are proven to be causal. What is proven: tests/unit/ir/test_masks.py."""

import pytest

from autopar.passes.read_masks import ReadMasks
from tests.passes.programs import assert_becomes, read

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


def test_a_choice_by_a_mask_that_is_true_everywhere_is_its_first() -> None:
    """Also where only one of two masks is; zeros of the result's shape are one zero, broadcast."""
    assert_becomes(
        ReadMasks(),
        """
        block model:
          q: [b, 2, s, 4] = parameter q
          bias: [1, 2, s, s] = parameter bias
          seen: [b, 1, 1, s] bool = input seen
          one: [] bool = ones([])
          p: [s] int = arange(s)
          i: [s, 1] int = unsqueeze(p, 1)
          ge: [s, 1] bool = ge.Scalar(i, 0)
          true: [s, 1] bool = __and__.Tensor(one, ge)
          both: [b, 1, s, s] bool = __and__.Tensor(true, seen)
          every: [1, 2, s, s] = where.ScalarOther(true, bias, -9.0)
          a: [b, 2, s, 4] = scaled_dot_product_attention(q, q, q, every)
          nothing: [1, 2, s, s] = zeros([1, 2, s, s])
          some: [b, 2, s, s] = where.ScalarOther(both, nothing, -9.0)
          c: [b, 2, s, 4] = scaled_dot_product_attention(a, a, a, some)
          d: [b, 2, s, 4] = scaled_dot_product_attention(c, c, c, nothing)
          return d
        """,
        """
        block model:
          q: [b, 2, s, 4] = parameter q
          bias: [1, 2, s, s] = parameter bias
          seen: [b, 1, 1, s] = input seen
          expand_default: [b, 1, s, s] = expand(seen, [b, 1, s, s])
          a: [b, 2, s, 4] = scaled_dot_product_attention(q, q, q, bias)
          zeros_default: [] = zeros([], dtype=torch.float64)
          where_scalar_other: [b, 1, s, s] = where(expand_default, zeros_default, -9.0)
          expand_default_1: [b, 2, s, s] = expand(where_scalar_other, [b, 2, s, s])
          c: [b, 2, s, 4] = scaled_dot_product_attention(a, a, a, expand_default_1)
          d: [b, 2, s, 4] = scaled_dot_product_attention(c, c, c, None, 0.0, False)
          return d
        """,
    )


@pytest.mark.parametrize(("conjunction", "kind"), [("logical_and", "bool"), ("bitwise_and.Tensor", "int")])
def test_integers_beside_a_mask_that_is_true_stay_what_the_conjunction_makes_of_them(
    conjunction: str, kind: str
) -> None:
    """2 is true, and its last bit is 0: neither is 2."""
    before = f"""
    block model:
      x: [b, s] = input x
      lengths: [b, s] int = input lengths
      p: [s] int = arange(s)
      true: [s] bool = ge.Scalar(p, 0)
      both: [b, s] {kind} = {conjunction}(true, lengths)
      y: [b, s] = mul.Tensor(x, both)
      return y
    """
    after = before.replace(" int =", " =").replace(" bool =", " =").replace(".Tensor", "").replace(".Scalar", "")
    assert_becomes(ReadMasks(), before, after)


def test_a_choice_keeps_what_has_a_gradient_of_zeros() -> None:
    """Left out, the parameter would have no gradient at all, and no weight decay."""
    text = """
    block model:
      x: [b, s, 4] = value 0
      other: [4] = parameter other
      p: [s] int = arange(s)
      i: [s, 1] int = unsqueeze(p, 1)
      ge: [s, 1] bool = ge.Scalar(i, 0)
      y: [b, s, 4] = where.self(ge, x, other)
      return y
    """
    program = ReadMasks().apply(read(text), None)
    assert "y" in [node.name for _, node in program.each_op()]
