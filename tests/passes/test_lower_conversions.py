"""lower_conversions: each line of the table of conversions."""

import pytest

from autopar.ir.text import program_text
from autopar.passes.insert_conversions import InsertConversions
from autopar.passes.lower_conversions import LowerConversions
from autopar.placement import CONVERSIONS, Kind, Placement
from tests.passes.programs import assert_becomes, plan, read, typed


@pytest.mark.parametrize(
    ("source", "target", "collective"),
    [
        ("R", "Rp", "copy_to(x, axis=tp)"),
        ("R", "S(1)", "split(x, 1, axis=tp)"),
        ("S(1)", "R", "gather(x, 1, axis=tp)"),
        ("S(1)", "Rp", "all_gather(x, 1, axis=tp)"),
        ("P", "R", "all_reduce(x, axis=tp)"),
        ("P", "S(1)", "reduce_scatter(x, 1, axis=tp)"),
        ("S(1)", "S(2)", "all_to_all(x, 1, 2, axis=tp)"),
        ("Rp", "S(2)", "take_shard(x, 2, axis=tp)"),
        ("Rp", "R", "grad_from_first(x, axis=tp)"),
        ("R", "P", "value_from_first(x, axis=tp)"),
        ("P", "Rp", "all_reduce_both(x, axis=tp)"),
        ("Rp", "P", "both_from_first(x, axis=tp)"),
        ("S(0)", "P", "pad_shard(x, 0, axis=tp)"),
    ],
)
def test_a_conversion_is_its_collective(source: str, target: str, collective: str) -> None:
    layer = """
    block Layer:
      x: [b, s, 8] = value 0
      y: [b, s, 8] = relu(x)
      return y

    y1 = Layer(y0)  # layers.0
    """
    chosen = plan(f"Layer.x: -> {source}\nLayer.y: {target} -> {target}")
    converted = InsertConversions().apply(typed(read(layer), chosen), chosen)
    after = LowerConversions().apply(converted, chosen)
    assert f"convert: [b, s, 8] {target} = {collective}" in program_text(after)


def test_every_conversion_of_the_table_is_tried_above() -> None:
    """Two placements of different kinds convert, unless the table has no line: Shard of one dim to itself."""
    (mark,) = test_a_conversion_is_its_collective.pytestmark  # type: ignore[attr-defined]
    tried = {tuple(Placement.parse(text).kind for text in case[:2]) for case in mark.args[1]}
    assert tried == set(CONVERSIONS)
    assert {(a, b) for a in Kind for b in Kind if a is not b} - tried == set()


def test_a_program_without_conversions_is_unchanged() -> None:
    layer = """
    block Layer:
      x: [b, s, 8] = value 0
      y: [b, s, 8] = relu(x)
      return y

    y1 = Layer(y0)  # layers.0
    """
    chosen = plan("Layer.x: -> R\nLayer.y: R -> R")
    before = typed(read(layer), chosen)
    assert_becomes(LowerConversions(), before, program_text(before), chosen)
