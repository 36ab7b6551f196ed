"""read_positions: masks and rows read by positions."""

import pytest
import torch

from autopar.ir.graph import MODEL, B, S, node_inputs, set_strategy
from autopar.passes.read_positions import ReadPositions
from autopar.placement import REPLICATE, Strategy
from tests.numerics.spmd import run_block
from tests.passes.programs import assert_becomes, read

MASK = """
    block model:
      x: [b, s] = input x
      i: [b] int = arange(b)
      rows: [b, 1, 1, 1] int = reshape(i, [b, 1, 1, 1])
      j: [s] int = arange.start(0, s)
      columns: [1, 1, s, 1] int = reshape(j, [1, 1, s, 1])
      y: [b, 1, s, 1] = index.Tensor(x, [rows, columns])
      return y
    """


def test_a_mask_read_by_all_its_positions_is_a_view() -> None:
    assert_becomes(
        ReadPositions(),
        MASK,
        """
        block model:
          x: [b, s] = input x
          reshape_default: [b, 1, s, 1] = reshape(x, [b, 1, s, 1])
          return reshape_default
        """,
    )


ROWS = """
    block model:
      x: [b, s, 4] = input x
      n: [b] int = input n
      i: [b] int = arange(b)
      y: [b, 4] = index.Tensor(x, [i, n])
      return y
    """


def test_one_place_of_each_sample_is_a_gather() -> None:
    assert_becomes(
        ReadPositions(),
        ROWS,
        """
        block model:
          x: [b, s, 4] = input x
          n: [b] = input n
          remainder_scalar: [b] = remainder(n, s)
          reshape_default: [b, 1, 1] = reshape(remainder_scalar, [b, 1, 1])
          expand_default: [b, 1, 4] = expand(reshape_default, [b, 1, 4])
          gather_default: [b, 1, 4] = gather(x, 1, expand_default)
          reshape_default_1: [b, 4] = reshape(gather_default, [b, 4])
          return reshape_default_1
        """,
    )


SWAPPED = """
    block model:
      x: [b, b] = input x
      i: [b] int = arange(b)
      rows: [1, b] int = reshape(i, [1, b])
      columns: [b, 1] int = reshape(i, [b, 1])
      y: [b, b] = index.Tensor(x, [rows, columns])
      return y
    """
SHIFTED = """
    block model:
      x: [b, s] = input x
      i: [b] int = arange(b)
      j: [s - 1] int = arange.start(1, s)
      rows: [b, 1] int = reshape(i, [b, 1])
      columns: [1, s - 1] int = reshape(j, [1, s - 1])
      y: [b, s - 1] = index.Tensor(x, [rows, columns])
      return y
    """


def test_a_transposition_stays() -> None:
    assert_becomes(ReadPositions(), SWAPPED, SWAPPED.replace(" int =", " =").replace("index.Tensor", "index"))


@pytest.mark.parametrize("text", [MASK, ROWS, SWAPPED, SHIFTED])
def test_the_values_stay(text: str) -> None:
    """On real tensors, with indices from the end among them."""
    b, s = 3, 5
    given = {"x": torch.randn(b, b if text is SWAPPED else s, 4)[..., slice(None) if text is ROWS else 0]}
    given["n"] = torch.tensor([0, -1, 3])
    results = []
    for program in (read(text), ReadPositions().apply(read(text), None)):
        block = program.blocks[MODEL]
        for node in block.ops:
            set_strategy(node, Strategy((REPLICATE,) * len(node_inputs(node)), REPLICATE))
        held = {node: [given[node.name]] for node in block.placeholders()}
        results.append(run_block(block, held, 1, {B: b, S: s})[0][0])
    assert torch.equal(results[0], results[1])
