"""raise_islands: positions, routers and norms in fp32, and nothing else."""

import pytest
import torch

from autopar.compile.notes import islands_note
from autopar.ir.graph import MODEL, info
from autopar.passes.raise_islands import RaiseIslands
from tests.passes.programs import assert_becomes, read

POSITIONS = """
block model:
  h: [b, s, 8] {dtype} = value 0
  table: [1, 8] fp32 = buffer table
  i: [s] int = arange(s)
  t: [s] {dtype} = to(i, torch.{name})
  wide: [s, 1] {dtype} = unsqueeze(t, 1)
  angle: [s, 8] {dtype} = div(wide, 100)
  turn: [s, 8] {dtype} = sin(angle)
  y: [b, s, 8] {dtype} = add(h, turn)
  return y
"""


def test_positions_are_numbers_of_sizes_until_they_meet_data() -> None:
    """N7: 257 is no number of bf16. Mixed with activations, what was made of them is in half precision again."""
    after = assert_becomes(
        RaiseIslands(),
        POSITIONS.format(dtype="bf16", name="bfloat16"),
        """
        block model:
          h: [b, s, 8] = value 0
          i: [s] = arange(s)
          t: [s] = to(i, torch.float32)
          wide: [s, 1] = unsqueeze(t, 1)
          angle: [s, 8] = div(wide, 100)
          turn: [s, 8] = sin(angle)
          to_dtype: [s, 8] = to(turn, torch.bfloat16)
          y: [b, s, 8] = add(h, to_dtype)
          return y
        """,
    )
    dtypes = {n.name: info(n).dtype for n in after.blocks[MODEL].ops}
    assert dtypes.pop("i") is torch.int64
    assert {n for n, dtype in dtypes.items() if dtype is torch.bfloat16} == {"to_dtype", "y"}
    assert islands_note(after) == "positions (model)"


def test_what_is_counted_in_the_batch_is_no_position() -> None:
    text = POSITIONS.format(dtype="fp16", name="float16").replace("i: [s] int = arange(s)", "i: [s] int = input i")
    assert_becomes(RaiseIslands(), text, _as_it_was(text))


def _as_it_was(text: str) -> str:
    """The program as it is printed, without the buffer that nothing reads."""
    lines = [line for line in text.strip().splitlines() if "table" not in line]
    for dtype in (" fp16 =", " int =", " bool ="):
        lines = [line.replace(dtype, " =") for line in lines]
    return "\n".join(lines)


ROUTER = """
block model:
  x: [b, s, 8] {dtype} = value 0
  w: [8, 4] {dtype} = parameter w
  logits: [b, s, 4] {dtype} = matmul(x, w)
  p: [b, s, 4] {dtype} = softmax(logits, -1)
  best: [b, s, 2] {dtype} = autopar_topk(p)
  total: [b, s, 1] {dtype} = sum.dim_IntList(best, [-1], True)
  weights: [b, s, 2] {dtype} = div(best, total)
  expert: [b, s, 2] {dtype} = slice(x, 2, 0, 2)
  y: [b, s, 2] {dtype} = mul(expert, weights)
  return y
"""


def _router(dtype: str) -> str:
    return ROUTER.format(dtype=dtype).replace("autopar_topk(p)", "topk_values(p, 2)")


def test_a_router_is_raised_from_its_logits_to_its_weights() -> None:
    after = assert_becomes(
        RaiseIslands(),
        _router("fp16"),
        """
        block model:
          x: [b, s, 8] = value 0
          w: [8, 4] = parameter w
          logits: [b, s, 4] = matmul(x, w)
          to_dtype: [b, s, 4] = to(logits, torch.float32)
          p: [b, s, 4] = softmax(to_dtype, -1)
          best: [b, s, 2] = topk_values(p, 2)
          total: [b, s, 1] = sum(best, [-1], True)
          weights: [b, s, 2] = div(best, total)
          expert: [b, s, 2] = slice(x, 2, 0, 2)
          to_dtype_1: [b, s, 2] = to(weights, torch.float16)
          y: [b, s, 2] = mul(expert, to_dtype_1)
          return y
        """,
    )
    assert islands_note(after) == "router (model)"


def test_a_softmax_of_attention_is_no_router() -> None:
    """torch's kernel sums in fp32 inside."""
    text = _router("fp16").replace("topk_values(p, 2)", "slice(p, 2, 0, 2)")
    assert_becomes(RaiseIslands(), text, _as_it_was(text).replace("sum.dim_IntList", "sum"))


def test_a_written_norm_squares_in_fp32() -> None:
    """300² is inf in fp16."""
    assert_becomes(
        RaiseIslands(),
        """
        block model:
          x: [b, 8] fp16 = value 0
          square: [b, 8] fp16 = pow(x, 2)
          m: [b, 1] fp16 = mean(square, [-1], True)
          e: [b, 1] fp16 = add(m, 1e-05)
          r: [b, 1] fp16 = rsqrt(e)
          y: [b, 8] fp16 = mul(x, r)
          return y
        """,
        """
        block model:
          x: [b, 8] = value 0
          to_dtype: [b, 8] = to(x, torch.float32)
          square: [b, 8] = pow(to_dtype, 2)
          m: [b, 1] = mean(square, [-1], True)
          e: [b, 1] = add(m, 1e-05)
          r: [b, 1] = rsqrt(e)
          to_dtype_1: [b, 1] = to(r, torch.float16)
          y: [b, 8] = mul(x, to_dtype_1)
          return y
        """,
    )


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_full_precision_stays(dtype: str) -> None:
    before = read(_router(dtype))
    after = RaiseIslands().apply(before, None)
    assert [n.name for n in after.blocks[MODEL].nodes] == [n.name for n in before.blocks[MODEL].nodes]
    assert not islands_note(after)
