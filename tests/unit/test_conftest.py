"""Cases that take turns: the marker `in_turn` of tests/conftest.py."""

from tests.conftest import cases_in_turn


def test_the_first_of_each_n_cases_is_kept() -> None:
    assert cases_in_turn([{"size": i} for i in range(7)], 3) == {0, 3, 6}


def test_of_stacked_parameters_each_value_is_kept() -> None:
    """The first varies fastest: every third case alone would be of its first value."""
    cases = [{"a": a, "b": b} for b in range(2) for a in range(3)]
    kept = cases_in_turn(cases, 3)
    assert {0, 3} < kept and {cases[i]["a"] for i in kept} == {0, 1, 2} and {cases[i]["b"] for i in kept} == {0, 1}
