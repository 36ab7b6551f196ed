"""clean: what tracing added and the math does not need."""

import pytest

from autopar.passes.clean import Clean
from tests.passes.programs import assert_becomes


def test_casts_take_one_form_and_those_that_do_nothing_go() -> None:
    assert_becomes(
        Clean(),
        """
        block model:
          x: [b, 8] bf16 = input x
          same: [b, 8] bf16 = to(x, torch.bfloat16)
          up: [b, 8] fp32 = _to_copy(same, dtype=torch.float32)
          back: [b, 8] bf16 = type_as(up, x)
          return back
        """,
        """
        block model:
          x: [b, 8] = input x
          up: [b, 8] = to(x, torch.float32)
          back: [b, 8] = to(up, torch.bfloat16)
          return back
        """,
    )


def test_views_are_reshapes_with_symbols_in_their_shapes() -> None:
    """T11: −1, flatten and sizes of the example become b and s."""
    assert_becomes(
        Clean(),
        """
        block model:
          x: [b, s, 8] = input x
          heads: [b, s, 2, 4] = view(x, [4, -1, 2, 4])
          flat: [b, s, 8] = flatten(heads, 2, 3)
          more: [b, 3, s, 8] = expand(flat, [-1, 3, -1, -1])
          return more
        """,
        """
        block model:
          x: [b, s, 8] = input x
          heads: [b, s, 2, 4] = reshape(x, [b, s, 2, 4])
          flat: [b, s, 8] = reshape(heads, [b, s, 8])
          more: [b, 3, s, 8] = expand(flat, [b, 3, s, 8])
          return more
        """,
    )


@pytest.mark.parametrize(
    "nothing",
    [
        "contiguous(x)",
        "clone(x)",
        "alias(x)",
        "view(x, [4, -1])",
        "slice(x, 0, 0, 9223372036854775807)",
        "dropout(x, 0.0, True)",
        "dropout(x, 0.5, False)",
        "mul(x, 1.0)",
        "add(x, 0)",
        "div(x, 1)",
    ],
)
def test_ops_that_do_nothing_go(nothing: str) -> None:
    assert_becomes(
        Clean(),
        f"""
        block model:
          x: [b, 8] = input x
          y: [b, 8] = {nothing}
          z: [b, 8] = relu(y)
          return z
        """,
        """
        block model:
          x: [b, 8] = input x
          z: [b, 8] = relu(x)
          return z
        """,
    )


@pytest.mark.parametrize(
    ("something", "shown"),
    [
        ("dropout(x, 0.5, True)", "dropout(x, 0.5, True)"),
        ("mul(x, 2.0)", "mul(x, 2.0)"),
        ("add(x, 1)", "add(x, 1)"),
        ("slice(x, 0, 0, 8, 1)", "slice(x, 0, 0, 8, 1)"),
    ],
)
def test_ops_that_do_something_stay(something: str, shown: str) -> None:
    size = "8" if "slice" in something else "b"
    assert_becomes(
        Clean(),
        f"""
        block model:
          x: [b, 8] = input x
          y: [{size}, 8] = {something}
          return y
        """,
        f"""
        block model:
          x: [b, 8] = input x
          y: [{size}, 8] = {shown}
          return y
        """,
    )


RMS = """
block model:
  x: [b, s, 8] {dtype} = input x
  w: [8] {dtype} = parameter w
  up: [b, s, 8] fp32 = to(x, torch.float32)
  square: [b, s, 8] fp32 = pow(up, {power})
  mean: [b, s, 1] fp32 = mean(square, [{dim}], True)
  shift: [b, s, 1] fp32 = add(mean, 1e-06)
  root: [b, s, 1] fp32 = rsqrt(shift)
  unit: [b, s, 8] fp32 = mul(up, root)
  down: [b, s, 8] {dtype} = to(unit, {back})
  y: [b, s, 8] {dtype} = mul(w, down)
  return y
"""


@pytest.mark.parametrize("dim", [-1, 2])
@pytest.mark.parametrize(("dtype", "back"), [("bf16", "torch.bfloat16"), ("fp32", "torch.float32")])
def test_an_rms_norm_is_recognised_with_its_casts(dim: int, dtype: str, back: str) -> None:
    """The weight stays outside: inside it would be another rounding."""
    assert_becomes(
        Clean(),
        RMS.format(dtype=dtype, power=2, dim=dim, back=back),
        """
        block model:
          x: [b, s, 8] = input x
          w: [8] = parameter w
          rms_norm_default: [b, s, 8] = rms_norm(x, [8], None, 1e-06)
          y: [b, s, 8] = mul(w, rms_norm_default)
          return y
        """,
    )


def test_an_rms_norm_whose_mean_alone_is_upcast_is_recognised() -> None:
    """T5's: bf16 times an fp32 root is the fp32 product."""
    assert_becomes(
        Clean(),
        RMS.format(dtype="bf16", power=2, dim=-1, back="torch.bfloat16").replace("mul(up, root)", "mul(x, root)"),
        """
        block model:
          x: [b, s, 8] = input x
          w: [8] = parameter w
          rms_norm_default: [b, s, 8] = rms_norm(x, [8], None, 1e-06)
          y: [b, s, 8] = mul(w, rms_norm_default)
          return y
        """,
    )


@pytest.mark.parametrize(("power", "dim"), [(3, -1), (2, 1)])
def test_what_only_looks_like_an_rms_norm_stays(power: int, dim: int) -> None:
    before = RMS.format(dtype="bf16", power=power, dim=dim, back="torch.bfloat16")
    assert_becomes(Clean(), before, before.replace(" bf16 =", " =").replace(" fp32 =", " ="))


def test_dead_code_goes() -> None:
    assert_becomes(
        Clean(),
        """
        block model:
          x: [b, 8] = input x
          w: [8] = parameter w
          unread: [b, 8] = mul(x, w)
          y: [b, 8] = relu(x)
          return y
        """,
        """
        block model:
          x: [b, 8] = input x
          y: [b, 8] = relu(x)
          return y
        """,
    )


def test_what_is_repeated_for_each_sample_is_of_a_sample() -> None:
    """A bias [h, 1, s] for every sample: its samples can be dealt out once they are a dim."""
    assert_becomes(
        Clean(),
        """
        block model:
          x: [4, 1, s] = input x
          bias: [4*b, 1, s] = repeat(x, [b, 1, 1])
          twice: [4*b, 2, s] = tile(bias, [1, 2, 1])
          return twice
        """,
        """
        block model:
          x: [4, 1, s] = input x
          reshape_default: [1, 4, 1, s] = reshape(x, [1, 4, 1, s])
          expand_default: [b, 4, 1, s] = expand(reshape_default, [b, 4, 1, s])
          bias: [4*b, 1, s] = reshape(expand_default, [4*b, 1, s])
          expand_default_1: [4*b, 2, s] = expand(bias, [4*b, 2, s])
          return expand_default_1
        """,
    )
