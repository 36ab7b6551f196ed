"""insert_conversions: one conversion for each value and placement wanted, and sizes made local."""

from autopar.ir.graph import Program
from autopar.passes.insert_conversions import InsertConversions
from autopar.plan.plan import Plan
from tests.passes.programs import assert_becomes, plan, read, typed


def _becomes(before: str, strategies: str, expected: str, tp: int = 2) -> Program:
    given: Plan = plan(strategies, tp)
    return assert_becomes(InsertConversions(), typed(read(before), given), expected, given)


def test_a_value_is_converted_once_for_all_its_readers() -> None:
    _becomes(
        """
        block Layer:
          x: [b, s, 8] = value 0
          u: [6, 8] = parameter u
          v: [6, 8] = parameter v
          d: [8, 6] = parameter d
          up: [b, s, 6] = linear(x, u)
          gate: [b, s, 6] = linear(x, v)
          h: [b, s, 6] = mul(up, gate)
          y: [b, s, 8] = linear(h, d)
          return y

        y1 = Layer(y0)  # layers.0
        y2 = Layer(y1)  # layers.1
        """,
        """
        Layer.x: -> R
        Layer.u: -> S(0)
        Layer.v: -> S(0)
        Layer.d: -> S(1)
        Layer.up: Rp, S(0) -> S(2)
        Layer.gate: Rp, S(0) -> S(2)
        Layer.h: S(2), S(2) -> S(2)
        Layer.y: S(2), S(1) -> P
        """,
        """
        block Layer:
          x: [b, s, 8] R = value 0
          u: [6, 8] S(0) = parameter u
          v: [6, 8] S(0) = parameter v
          d: [8, 6] S(1) = parameter d
          convert: [b, s, 8] Rp = convert(x, R, Rp, tp)
          up: [b, s, 6] S(2) = linear(convert, u)
          gate: [b, s, 6] S(2) = linear(convert, v)
          h: [b, s, 6] S(2) = mul(up, gate)
          y: [b, s, 8] P = linear(h, d)
          convert_1: [b, s, 8] R = convert(y, P, R, tp)
          return convert_1

        y1 = Layer(y0)  # layers.0
        y2 = Layer(y1)  # layers.1
        """,
    )


def test_two_wishes_are_two_conversions() -> None:
    _becomes(
        """
        block Layer:
          x: [b, s, 8] = value 0
          w: [8] = parameter w
          n: [b, s, 8] = rms_norm(x, [8], w)
          y: [b, s, 8] = add(x, n)
          return y

        y1 = Layer(y0)  # layers.0
        y2 = Layer(y1)  # layers.1
        """,
        """
        Layer.x: -> R
        Layer.w: -> Rp
        Layer.n: S(1), Rp -> S(1)
        Layer.y: P, P -> P
        """,
        """
        block Layer:
          x: [b, s, 8] R = value 0
          w: [8] Rp = parameter w
          convert: [b, s, 8] S(1) = convert(x, R, S(1), tp)
          n: [b, s, 8] S(1) = rms_norm(convert, [8], w)
          convert_1: [b, s, 8] P = convert(x, R, P, tp)
          convert_2: [b, s, 8] P = convert(n, S(1), P, tp)
          y: [b, s, 8] P = add(convert_1, convert_2)
          convert_3: [b, s, 8] R = convert(y, P, R, tp)
          return convert_3

        y1 = Layer(y0)  # layers.0
        y2 = Layer(y1)  # layers.1
        """,
    )


def test_the_loss_leaves_whole() -> None:
    _becomes(
        """
        block model:
          x: [b, 8] = input x
          w: [8] = parameter w
          h: [b, 8] = mul(x, w)
          y: [] = sum(h)
          return y
        """,
        """
        model.x: -> R
        model.w: -> S(0)
        model.h: S(1), S(0) -> S(1)
        model.y: S(1) -> P
        """,
        """
        block model:
          x: [b, 8] R = input x
          w: [8] S(0) = parameter w
          convert: [b, 8] S(1) = convert(x, R, S(1), tp)
          h: [b, 8] S(1) = mul(convert, w)
          y: [] P = sum(h)
          convert_1: [] R = convert(y, P, R, tp)
          return convert_1
        """,
    )


SIZES = """
block Layer:
  x: [b, s, 12] = value 0
  heads: [b, s, 4, 3] = reshape(x, [b, s, 4, 3])
  y: [b, s, 12] = reshape(heads, [b, s, 12])
  return y

y1 = Layer(y0)  # layers.0
y2 = Layer(y1)  # layers.1
"""


def test_sizes_are_those_of_the_shard() -> None:
    _becomes(
        SIZES,
        "Layer.x: -> S(2)\nLayer.heads: S(2) -> S(2)\nLayer.y: S(2) -> S(2)",
        """
        block Layer:
          x: [b, s, 12] S(2) = value 0
          heads: [b, s, 4, 3] S(2) = reshape(x, [b, s, 2, 3])
          y: [b, s, 12] S(2) = reshape(heads, [b, s, 6])
          return y

        y1 = Layer(y0)  # layers.0
        y2 = Layer(y1)  # layers.1
        """,
    )


def test_a_sharded_sequence_is_a_fraction_of_s() -> None:
    _becomes(
        SIZES,
        "Layer.x: -> S(1)\nLayer.heads: S(1) -> S(1)\nLayer.y: S(1) -> S(1)",
        """
        block Layer:
          x: [b, s, 12] S(1) = value 0
          heads: [b, s, 4, 3] S(1) = reshape(x, [b, s/4, 4, 3])
          y: [b, s, 12] S(1) = reshape(heads, [b, s/4, 12])
          return y

        y1 = Layer(y0)  # layers.0
        y2 = Layer(y1)  # layers.1
        """,
        tp=4,
    )


def test_shards_that_differ_in_size_are_written_minus_one() -> None:
    """S1"""
    _becomes(
        """
        block Layer:
          x: [b, s, 7] = value 0
          flat: [b*s, 7] = reshape(x, [b*s, 7])
          y: [b, s, 7] = reshape(flat, [b, s, 7])
          return y

        y1 = Layer(y0)  # layers.0
        y2 = Layer(y1)  # layers.1
        """,
        "Layer.x: -> S(2)\nLayer.flat: S(2) -> S(1)\nLayer.y: S(1) -> S(2)",
        """
        block Layer:
          x: [b, s, 7] S(2) = value 0
          flat: [b*s, 7] S(1) = reshape(x, [b*s, -1])
          y: [b, s, 7] S(2) = reshape(flat, [b, s, -1])
          return y

        y1 = Layer(y0)  # layers.0
        y2 = Layer(y1)  # layers.1
        """,
    )


def test_a_constant_is_made_at_the_size_of_its_shard() -> None:
    _becomes(
        """
        block model:
          x: [8] = input x
          z: [8] = zeros([8])
          y: [8] = add(x, z)
          return y
        """,
        "model.x: -> R\nmodel.z: -> S(0)\nmodel.y: S(0), S(0) -> S(0)",
        """
        block model:
          x: [8] R = input x
          z: [8] S(0) = zeros([4])
          convert: [8] S(0) = convert(x, R, S(0), tp)
          y: [8] S(0) = add(convert, z)
          convert_1: [8] R = convert(y, S(0), R, tp)
          return convert_1
        """,
    )


def test_one_value_read_twice_by_an_op_in_two_placements() -> None:
    """x·x where one factor is a summand: the other must be whole."""
    _becomes(
        """
        block Layer:
          x: [b, s, 8] = value 0
          y: [b, s, 8] = mul(x, x)
          return y

        y1 = Layer(y0)  # layers.0
        y2 = Layer(y1)  # layers.1
        """,
        "Layer.x: -> P\nLayer.y: P, Rp -> P",
        """
        block Layer:
          x: [b, s, 8] P = value 0
          convert: [b, s, 8] Rp = convert(x, P, Rp, tp)
          y: [b, s, 8] P = mul(x, convert)
          return y

        y1 = Layer(y0)  # layers.0
        y2 = Layer(y1)  # layers.1
        """,
    )
