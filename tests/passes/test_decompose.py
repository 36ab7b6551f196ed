"""decompose: splits, results, biases, products of flattened values."""

from autopar.passes.decompose import Decompose
from tests.passes.programs import assert_becomes


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


def test_conv1d_of_gpt2_is_a_matmul_on_all_leading_dims_and_a_bias() -> None:
    assert_becomes(
        Decompose(),
        """
        block model:
          x: [b, s, 8] = input x
          w: [8, 12] = parameter w
          c: [12] = parameter c
          flat: [b*s, 8] = reshape(x, [b*s, 8])
          y: [b*s, 12] = addmm(c, flat, w)
          z: [b, s, 12] = reshape(y, [b, s, 12])
          return z
        """,
        """
        block model:
          x: [b, s, 8] = input x
          w: [8, 12] = parameter w
          c: [12] = parameter c
          matmul_default_1: [b, s, 12] = matmul(x, w)
          add_tensor_1: [b, s, 12] = add(matmul_default_1, c)
          return add_tensor_1
        """,
    )


def test_a_product_read_in_another_shape_stays_flat() -> None:
    before = """
        block model:
          x: [b, s, 8] = input x
          w: [12, 8] = parameter w
          flat: [b*s, 8] = reshape(x, [b*s, 8])
          y: [b*s, 12] = linear(flat, w)
          z: [s, b, 12] = reshape(y, [s, b, 12])
          return z
        """
    assert_becomes(Decompose(), before, before)


def test_the_factors_of_addmm_are_products() -> None:
    assert_becomes(
        Decompose(),
        """
        block model:
          x: [b, 8] = input x
          w: [8, 12] = parameter w
          c: [12] = parameter c
          y: [b, 12] = addmm(c, x, w, beta=0.5, alpha=2)
          return y
        """,
        """
        block model:
          x: [b, 8] = input x
          w: [8, 12] = parameter w
          c: [12] = parameter c
          matmul_default: [b, 12] = matmul(x, w)
          mul_tensor: [b, 12] = mul(matmul_default, 2)
          mul_tensor_1: [12] = mul(c, 0.5)
          add_tensor: [b, 12] = add(mul_tensor, mul_tensor_1)
          return add_tensor
        """,
    )


def test_values_of_a_ranking_are_gathered_at_its_indices() -> None:
    assert_becomes(
        Decompose(),
        """
        block model:
          x: [b, 8] = input x
          top: [b, 2] = topk(x, 2)
          values: [b, 2] = getitem(top, 0)
          places: [b, 2] int = getitem(top, 1)
          return values, places
        """,
        """
        block model:
          x: [b, 8] = input x
          topk_indices_default: [b, 2] = topk_indices(x, 2)
          gather_default: [b, 2] = gather(x, -1, topk_indices_default)
          return gather_default, topk_indices_default
        """,
    )


def test_each_result_of_an_op_is_an_op() -> None:
    assert_becomes(
        Decompose(),
        """
        block model:
          x: [b, 8] = input x
          top: [b, 2] = topk(x, 2)
          values: [b, 2] = getitem(top, 0)
          largest: [b] = max.dim(x, 1)
          most: [b] = getitem(largest, 0)
          place: [b] int = getitem(largest, 1)
          return values, most, place
        """,
        """
        block model:
          x: [b, 8] = input x
          topk_values_default: [b, 2] = topk_values(x, 2)
          max_dim_values_default: [b] = max_dim_values(x, 1)
          max_dim_indices_default: [b] = max_dim_indices(x, 1)
          return topk_values_default, max_dim_values_default, max_dim_indices_default
        """,
    )


def test_glu_is_a_product_of_halves() -> None:
    assert_becomes(
        Decompose(),
        """
        block model:
          x: [b, 8] = input x
          y: [b, 4] = glu(x)
          return y
        """,
        """
        block model:
          x: [b, 8] = input x
          slice_tensor: [b, 4] = slice(x, 1, 0, 4)
          slice_tensor_1: [b, 4] = slice(x, 1, 4, 8)
          sigmoid_default: [b, 4] = sigmoid(slice_tensor_1)
          mul_tensor: [b, 4] = mul(slice_tensor, sigmoid_default)
          return mul_tensor
        """,
    )
