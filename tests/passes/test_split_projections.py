"""split_projections: every spelling of a fused projection is one product a part (FAULTS S4)."""

import pytest

from autopar.ir.graph import Fused, Program
from autopar.passes.decompose import Decompose
from autopar.passes.split_parameters import SplitParameters
from autopar.passes.split_projections import SplitProjections
from tests.passes.programs import assert_becomes, read


def prepared(text: str) -> Program:
    program = read(text)
    for step in (Decompose(), SplitProjections(), SplitParameters()):
        program = step.apply(program, None)
    return program


def test_slices_of_a_product_are_products_with_slices() -> None:
    assert_becomes(
        SplitProjections(),
        """
        block model:
          x: [b, 8] = input x
          w: [12, 8] = parameter w
          c: [12] = parameter c
          y: [b, 12] = linear(x, w)
          z: [b, 12] = add(y, c)
          q: [b, 8] = slice(z, 1, 0, 8)
          k: [b, 4] = slice(z, -1, 8, 12)
          return q, k
        """,
        """
        block model:
          x: [b, 8] = input x
          w: [12, 8] = parameter w
          c: [12] = parameter c
          slice_tensor: [8, 8] = slice(w, 0, 0, 8)
          linear_default: [b, 8] = linear(x, slice_tensor)
          slice_tensor_1: [8] = slice(c, 0, 0, 8)
          add_tensor: [b, 8] = add(linear_default, slice_tensor_1)
          slice_tensor_2: [4, 8] = slice(w, 0, 8, 12)
          linear_default_1: [b, 4] = linear(x, slice_tensor_2)
          slice_tensor_3: [4] = slice(c, 0, 8, 12)
          add_tensor_1: [b, 4] = add(linear_default_1, slice_tensor_3)
          return add_tensor, add_tensor_1
        """,
    )


def test_selects_of_a_view_are_views_of_parts() -> None:
    """timm: qkv(x).reshape(b, n, 3, heads, e).permute(2, 0, 3, 1, 4).unbind(0)."""
    assert_becomes(
        SplitProjections(),
        """
        block model:
          x: [b, s, 8] = input x
          w: [12, 8] = parameter w
          y: [b, s, 12] = linear(x, w)
          v: [b, s, 2, 3, 2] = reshape(y, [b, s, 2, 3, 2])
          t: [2, b, 3, s, 2] = permute(v, [2, 0, 3, 1, 4])
          q: [b, 3, s, 2] = select(t, 0, 0)
          k: [b, 3, s, 2] = select(t, 0, 1)
          return q, k
        """,
        """
        block model:
          x: [b, s, 8] = input x
          w: [12, 8] = parameter w
          slice_tensor: [6, 8] = slice(w, 0, 0, 6)
          linear_default: [b, s, 6] = linear(x, slice_tensor)
          reshape_default: [b, s, 3, 2] = reshape(linear_default, [b, s, 3, 2])
          transpose_int: [b, 3, s, 2] = transpose(reshape_default, 1, 2)
          slice_tensor_1: [6, 8] = slice(w, 0, 6, 12)
          linear_default_1: [b, s, 6] = linear(x, slice_tensor_1)
          reshape_default_1: [b, s, 3, 2] = reshape(linear_default_1, [b, s, 3, 2])
          transpose_int_1: [b, 3, s, 2] = transpose(reshape_default_1, 1, 2)
          return transpose_int, transpose_int_1
        """,
    )


HEAD = """
        block model:
          x: [b, 8] = input x
          w: [12, 8] = parameter qkv.weight
          c: [12] = parameter qkv.bias
          y: [b, 12] = linear(x, w, c)
"""
SPELLINGS = {
    "chunk": """
          p: [b, 6] = chunk(y, 2, -1)
          q: [b, 6] = getitem(p, 0)
          k: [b, 6] = getitem(p, 1)""",
    "split": """
          p: [b, 6] = split(y, 6, 1)
          q: [b, 6] = getitem(p, 0)
          k: [b, 6] = getitem(p, 1)""",
    "split_with_sizes": """
          p: [b, 8] = split_with_sizes(y, [8, 4], 1)
          q: [b, 8] = getitem(p, 0)
          k: [b, 4] = getitem(p, 1)""",
    "slicing": """
          q: [b, 7] = slice(y, 1, 0, -5)
          k: [b, 5] = slice(y, 1, -5, 9223372036854775807)""",
    "unbind": """
          v: [b, 2, 3, 2] = reshape(y, [b, 2, 3, 2])
          p: [b, 3, 2] = unbind.int(v, 1)
          q: [b, 3, 2] = getitem(p, 0)
          k: [b, 3, 2] = getitem(p, 1)""",
    "select": """
          v: [b, 2, 3, 2] = reshape(y, [b, 2, 3, 2])
          t: [b, 3, 2, 2] = transpose(v, 1, 2)
          q: [b, 3, 2] = select(t, 2, 0)
          k: [b, 3, 2] = select(t, -2, -1)""",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_each_spelling_gives_a_parameter_a_part(spelling: str) -> None:
    program = prepared(f"{HEAD.rstrip()}{SPELLINGS[spelling]}\n          return q, k")
    assert program.fused == {
        name: Fused((f"qkv._{name[4:]}_0", f"qkv._{name[4:]}_1"), 0) for name in ("qkv.weight", "qkv.bias")
    }
    assert set(program.parameters) == {part for fused in program.fused.values() for part in fused.parts}


def test_a_weight_that_is_stored_transposed_is_split_on_its_second_dim() -> None:
    program = prepared(
        """
        block model:
          x: [b, s, 8] = input x
          w: [8, 12] = parameter c_attn.weight
          c: [12] = parameter c_attn.bias
          flat: [b*s, 8] = reshape(x, [b*s, 8])
          y: [b*s, 12] = addmm(c, flat, w)
          z: [b, s, 12] = reshape(y, [b, s, 12])
          p: [b, s, 4] = split(z, 4, 2)
          q: [b, s, 4] = getitem(p, 0)
          k: [b, s, 4] = getitem(p, 1)
          v: [b, s, 4] = getitem(p, 2)
          return q, k, v
        """
    )
    assert program.fused == {
        "c_attn.weight": Fused(tuple(f"c_attn._weight_{i}" for i in range(3)), 1),
        "c_attn.bias": Fused(tuple(f"c_attn._bias_{i}" for i in range(3)), 0),
    }
    assert program.parameters["c_attn._weight_1"].shape == (8, 4)


UNFUSED = """
block model:
  x: [b, 8] = input x
  w: [12, 8] = parameter w
  y: [b, 12] = linear(x, w)
  q: [b, 6] = slice(y, -1, 0, 6)
  {more}
"""


@pytest.mark.parametrize(
    "more",
    [
        "z: [b, 12] = relu(y)\n  return q, z",  # also read whole
        "k: [b, 4] = slice(y, -1, 8, 12)\n  return q, k",  # a part is dropped
        "k: [b, 8] = slice(y, -1, 4, 12)\n  return q, k",  # parts overlap
        "k: [b, 3] = slice(y, -1, 6, 12, 2)\n  return q, k",  # every second feature
        "k: [b, 6] = slice(y, -1, 6, 12)\n  u: [12, 8] = relu(w)\n  return q, k, u",  # the weight is read otherwise
    ],
)
def test_other_projections_stay(more: str) -> None:
    before = UNFUSED.format(more=more)
    assert_becomes(SplitProjections(), before, before)


def test_an_addend_that_is_spread_over_the_features_is_no_bias() -> None:
    before = UNFUSED.format(more="return q").replace(
        "  y: [b, 12] = linear(x, w)",
        "  one: [1] = parameter one\n  p: [b, 12] = linear(x, w)\n  y: [b, 12] = add(p, one)",
    )
    before = before.replace("return q", "k: [b, 6] = slice(y, -1, 6, 12)\n  return q, k")
    assert_becomes(SplitProjections(), before, before)
