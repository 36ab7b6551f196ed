"""eliminate_dead_code: what no result depends on."""

from autopar.passes.eliminate_dead_code import EliminateDeadCode
from tests.passes.programs import assert_becomes


def test_chains_that_end_nowhere_go_with_their_parameters() -> None:
    assert_becomes(
        EliminateDeadCode(),
        """
        block model:
          x: [b, 8] = input x
          w: [4, 8] = parameter w
          v: [4, 8] = parameter v
          h: [b, 4] = linear(x, v)
          dead: [b, 4] = relu(h)
          y: [b, 4] = linear(x, w)
          return y
        """,
        """
        block model:
          x: [b, 8] = input x
          w: [4, 8] = parameter w
          y: [b, 4] = linear(x, w)
          return y
        """,
    )
