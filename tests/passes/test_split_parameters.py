"""split_parameters: a parameter read only in slices becomes its slices."""

import pytest

from autopar.errors import PlanError
from autopar.ir.graph import Fused
from autopar.passes.split_parameters import SplitParameters
from tests.passes.programs import assert_becomes, read


def test_gate_and_up_become_parameters_of_their_own() -> None:
    after = assert_becomes(
        SplitParameters(),
        """
        block model:
          w: [4, 12, 8] = parameter experts.gate_up
          gate: [4, 6, 8] = slice(w, 1, 0, 6)
          up: [4, 6, 8] = slice(w, 1, 6, 9223372036854775807)
          y: [4, 6, 8] = mul(gate, up)
          return y
        """,
        """
        block model:
          experts__gate_up_0: [4, 6, 8] = parameter experts._gate_up_0
          experts__gate_up_1: [4, 6, 8] = parameter experts._gate_up_1
          y: [4, 6, 8] = mul(experts__gate_up_0, experts__gate_up_1)
          return y
        """,
    )
    assert after.fused == {"experts.gate_up": Fused(("experts._gate_up_0", "experts._gate_up_1"), 1)}
    assert set(after.parameters) == {"experts._gate_up_0", "experts._gate_up_1"}


def test_a_part_that_has_the_name_of_another_parameter_is_refused() -> None:
    with pytest.raises(PlanError, match="w is read in parts, one to be called _w_1, as another is"):
        SplitParameters().apply(
            read("""
            block model:
              w: [6, 8] = parameter w
              other: [6, 8] = parameter _w_1
              a: [3, 8] = slice(w, 0, 0, 3)
              b: [3, 8] = slice(w, 0, 3, 6)
              c: [3, 8] = mul(a, b)
              y: [9, 8] = cat([c, other])
              return y
            """),
            None,
        )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("slice(w, 0, 0, 4)", "slice(w, 0, 2, 6)"),  # rows 2 and 3 twice
        ("slice(w, 0, 0, 2)", "slice(w, 0, 4, 6)"),  # not rows 2 and 3
        ("slice(w, 0, 0, 4)", "relu(w)"),
        ("slice(w, 0, 0, 6, 2)", "slice(w, 0, 1, 6, 2)"),
    ],
)
def test_a_parameter_read_in_any_other_way_stays_one(first: str, second: str) -> None:
    program = f"""
        block model:
          w: [6, 8] = parameter w
          a: [4, 8] = {first}
          c: [4, 8] = {second}
          y: [4, 8] = mul(a, c)
          return y
        """
    after = assert_becomes(SplitParameters(), program, program)
    assert not after.fused
