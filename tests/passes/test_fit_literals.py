"""fit_literals: constants in the range of half precision."""

import pytest
import torch
from torch import Tensor, nn

from autopar.compile.compiler import prepare
from autopar.ir.graph import MODEL
from autopar.passes.fit_literals import FitLiterals
from tests.passes.programs import assert_becomes, read

FILLED = """
block model:
  x: [b, s] {dtype} = value 0
  m: [b, s] bool = input m
  y: [b, s] {dtype} = masked_fill.Scalar(x, m, {low})
  z: [b, s] {dtype} = where.ScalarOther(m, y, {high})
  small: [b, s] {dtype} = masked_fill.Scalar(z, m, -10000.0)
  last: [b, s] {dtype} = masked_fill.Scalar(small, m, -inf)
  return last
"""


@pytest.mark.parametrize(
    ("dtype", "given", "kept"),
    [("fp16", ("-1e9", "1e9"), ("-32752.0", "32752.0")), ("bf16", ("-1e9", "3.4e38"), ("-1e9", "1.694e38"))],
)
def test_numbers_that_fill_tensors_fit(dtype: str, given: tuple[str, str], kept: tuple[str, str]) -> None:
    after = FitLiterals().apply(read(FILLED.format(dtype=dtype, low=given[0], high=given[1])), None)
    y, z, small, inf = after.blocks[MODEL].ops
    assert (y.args[2], small.args[2]) == (float(kept[0]), -10000.0)
    assert z.args[2] == pytest.approx(float(kept[1]), rel=1e-2)
    assert inf.args[2] == float("-inf")  # the author's own


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_full_precision_stays(dtype: str) -> None:
    y, z, *_ = FitLiterals().apply(read(FILLED.format(dtype=dtype, low="-1e9", high="1e9")), None).blocks[MODEL].ops
    assert (y.args[2], z.args[2]) == (-1e9, 1e9)


def test_products_with_masks_fit_and_others_stay() -> None:
    """A number times a value that is no mask may well be in range."""
    assert_becomes(
        FitLiterals(),
        """
        block model:
          x: [b, s] fp16 = value 0
          m: [b, s] bool = input m
          half: [b, s] fp16 = to(m, torch.float16)
          hidden: [b, s] fp16 = rsub.Scalar(half, 1.0)
          wide: [b, 1, s] fp16 = unsqueeze(hidden, 1)
          low: [b, 1, s] fp16 = mul(wide, -1e9)
          more: [b, s] fp16 = mul(x, 1e9)
          y: [b, s, s] fp16 = add(more, low)
          return y
        """,
        """
        block model:
          x: [b, s] = value 0
          m: [b, s] = input m
          half: [b, s] = to(m, torch.float16)
          hidden: [b, s] = rsub(half, 1.0)
          wide: [b, 1, s] = unsqueeze(hidden, 1)
          low: [b, 1, s] = mul(wide, -32752.0)
          more: [b, s] = mul(x, 1000000000.0)
          y: [b, s, s] = add(more, low)
          return y
        """,
    )


def test_a_tensor_of_one_number_fits_where_it_is_filled_in() -> None:
    assert_becomes(
        FitLiterals(),
        """
        block model:
          x: [b, s] fp16 = value 0
          m: [b, s] bool = input m
          low: [] fp32 = full([], -1e9)
          y: [b, s] fp16 = where.self(m, x, low)
          return y
        """,
        """
        block model:
          x: [b, s] = value 0
          m: [b, s] = input m
          full_default: [] = full([], -32752.0)
          y: [b, s] = where(m, x, full_default)
          return y
        """,
    )


def test_a_guard_against_infs_looks_at_each_element() -> None:
    """T5's: whether any value of the batch is inf would couple its samples."""
    assert_becomes(
        FitLiterals(),
        """
        block model:
          x: [b, s] fp16 = value 0
          seen: [b, s] bool = isinf(x)
          some: [] bool = any(seen)
          c: [] fp32 = where.Scalar(some, 64504.0, 65504.0)
          low: [] fp32 = neg(c)
          y: [b, s] fp16 = clamp.Tensor(x, low, c)
          return y
        """,
        """
        block model:
          x: [b, s] = value 0
          clamp_default: [b, s] = clamp(x, -64504.0, 64504.0)
          return clamp_default
        """,
    )


class Filled(nn.Module):
    """Every idiom of masks, on a score that a parameter scales."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.value = value

    def forward(self, x: Tensor, m: Tensor) -> Tensor:
        y = self.w * x
        scores = [
            y.masked_fill(m, self.value),
            torch.where(m, self.value, y),
            torch.where(m, torch.tensor(self.value), y),
            y + m.to(y.dtype) * self.value,
            y + (1 - (~m).to(y.dtype)) * self.value,
            y + torch.zeros_like(y).masked_fill(m, self.value),
        ]
        return torch.stack(scores).softmax(-1).square().sum()


def test_traced_masks_hide_as_in_fp32() -> None:
    """What the idioms trace to is found, and what is masked has no weight, rows that are all masked no NaN."""
    x, m = torch.randn(3, 5), torch.rand(3, 5) < 0.5
    m[0] = True
    program = prepare(Filled(-1e9), {"x": x, "m": m}, "fp16")
    numbers = [a for n in program.blocks["epilogue"].ops for a in n.args if isinstance(a, int | float)]
    assert numbers.count(-32752.0) == 6 and -1e9 not in numbers
