"""T12: an op without a rule is replicated, and named with what that costs."""

import warnings

import pytest

from autopar.ir.graph import B, S
from autopar.search.unknown_ops import warn_unknown
from tests.passes.programs import read

TEXT = """
block model:
  x: [b, s, 8] = value 0
  w: [3, 8] = parameter w
  h: [b, s, 8] = relu(x)
  y: [b, s, 3] = cdist(h, w)
  return y
"""


def test_an_op_without_a_rule_is_named_with_its_cost() -> None:
    with pytest.warns(UserWarning, match=r"cdist at y has no sharding rule: it is replicated on tp \(\d\d\.\d% of"):
        warn_unknown(read(TEXT), {B: 1, S: 64})


def test_ops_with_rules_are_not_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_unknown(read(TEXT.replace("cdist(h, w)", "linear(h, w)")), {B: 1, S: 64})
