"""decompose: splits, fused projections, biases."""

from autopar.ir.graph import Fused
from autopar.passes.decompose import Decompose
from tests.passes.programs import assert_becomes, read


def test_a_linear_loses_its_bias_to_an_add() -> None:
    assert_becomes(
        Decompose(),
        """
        block model:
          x: [b, 8] = input x
          w: [4, 8] = parameter out.weight
          c: [4] = parameter out.bias
          y: [b, 4] = linear(x, w, c)
          return y
        """,
        """
        block model:
          x: [b, 8] = input x
          w: [4, 8] = parameter out.weight
          c: [4] = parameter out.bias
          linear_default: [b, 4] = linear(x, w)
          add_tensor: [b, 4] = add(linear_default, c)
          return add_tensor
        """,
    )


def test_a_fused_projection_is_one_linear_a_part() -> None:
    """S4: no Shard(0) of a fused weight holds a part of q, of k and of v."""
    after = assert_becomes(
        Decompose(),
        """
        block model:
          x: [b, 8] = input x
          w: [12, 8] = parameter attn.qkv.weight
          c: [12] = parameter attn.qkv.bias
          y: [b, 12] = linear(x, w, c)
          parts: [b, 6] = split(y, 6, -1)
          q: [b, 6] = getitem(parts, 0)
          k: [b, 6] = getitem(parts, 1)
          z: [b, 6] = mul(q, k)
          return z
        """,
        """
        block model:
          x: [b, 8] = input x
          attn_qkv__weight_0: [6, 8] = parameter attn.qkv._weight_0
          attn_qkv__weight_1: [6, 8] = parameter attn.qkv._weight_1
          attn_qkv__bias_0: [6] = parameter attn.qkv._bias_0
          attn_qkv__bias_1: [6] = parameter attn.qkv._bias_1
          linear_default_2: [b, 6] = linear(x, attn_qkv__weight_0)
          add_tensor: [b, 6] = add(linear_default_2, attn_qkv__bias_0)
          linear_default_3: [b, 6] = linear(x, attn_qkv__weight_1)
          add_tensor_1: [b, 6] = add(linear_default_3, attn_qkv__bias_1)
          z: [b, 6] = mul(add_tensor, add_tensor_1)
          return z
        """,
    )
    assert after.fused == {
        "attn.qkv.weight": Fused(("attn.qkv._weight_0", "attn.qkv._weight_1"), 0),
        "attn.qkv.bias": Fused(("attn.qkv._bias_0", "attn.qkv._bias_1"), 0),
    }
    assert set(after.parameters) == {part for fused in after.fused.values() for part in fused.parts}


def test_grouped_heads_give_parts_of_different_sizes() -> None:
    after = Decompose().apply(
        read(
            """
            block model:
              x: [b, 8] = input x
              w: [16, 8] = parameter qkv.weight
              y: [b, 16] = linear(x, w)
              parts: [b, 8] = split_with_sizes(y, [8, 4, 4], 1)
              q: [b, 8] = getitem(parts, 0)
              k: [b, 4] = getitem(parts, 1)
              v: [b, 4] = getitem(parts, 2)
              return q, k, v
            """
        ),
        None,
    )
    assert [after.parameters[f"qkv._weight_{i}"].shape[0] for i in range(3)] == [8, 4, 4]


UNFUSED = """
block model:
  x: [b, 8] = input x
  w: [12, 8] = parameter w
  y: [b, 12] = linear(x, w)
  q: [b, 6] = slice(y, -1, 0, 6)
  {more}
"""


def test_a_projection_that_is_also_read_whole_stays() -> None:
    before = UNFUSED.format(more="z: [b, 12] = relu(y)\n  return q, z")
    assert_becomes(Decompose(), before, before)


def test_a_projection_of_which_a_part_is_dropped_stays() -> None:
    before = UNFUSED.format(more="k: [b, 4] = slice(y, -1, 8, 12)\n  return q, k")
    assert_becomes(Decompose(), before, before)


def test_chunks_of_a_value_are_slices() -> None:
    assert_becomes(
        Decompose(),
        """
        block model:
          x: [b, 7] = input x
          parts: [b, 4] = chunk(x, 2, -1)
          a: [b, 4] = getitem(parts, 0)
          c: [b, 3] = getitem(parts, -1)
          return a, c
        """,
        """
        block model:
          x: [b, 7] = input x
          slice_tensor: [b, 4] = slice(x, 1, 0, 4)
          slice_tensor_1: [b, 3] = slice(x, 1, 4, 7)
          return slice_tensor, slice_tensor_1
        """,
    )
