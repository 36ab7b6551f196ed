"""cut_sequence: shapes of one rank of cp, attention that knows of the others."""

import re
from dataclasses import replace

import pytest

from autopar.errors import PlanError
from autopar.ir.custom import OpaqueCall
from autopar.ir.graph import Program, update_info
from autopar.ir.text import program_text
from autopar.passes.cut_sequence import CutSequence
from autopar.passes.insert_conversions import InsertConversions
from autopar.passes.shard_parameters import ShardParameters
from autopar.plan.plan import Plan
from tests.passes.programs import context_plan, read

_LAYER = """
block Layer:
  x: [b, s, 8] = value 0
  w: [8, 8] = parameter w
  y: [b, s, 8] = linear(x, w)
  h: [b, s, 2, 4] = reshape(y, [b, s, 2, 4])
  q: [b, 2, s, 4] = transpose(h, 1, 2)
  a: [b, 2, s, 4] = scaled_dot_product_attention(q, q, q, None, 0.0, {causal})
  t: [b, s, 2, 4] = transpose(a, 1, 2)
  z: [b, s, 8] = reshape(t, [b, s, 8])
  return z

y1 = Layer(y0)  # layers.0
y2 = Layer(y1)  # layers.1
"""

_STRATEGIES = """
Layer.x: -> S(1)
Layer.w: -> Rp
Layer.y: S(1), Rp -> S(1)
Layer.h: S(1) -> S(1)
Layer.q: S(1) -> S(2)
Layer.a: {attention}
Layer.t: S({after}) -> S({back})
Layer.z: S(1) -> S(1)
"""


def cut(attention: str, causal: bool, layout: str, after: tuple[int, int] = (2, 1), sequence: int = 8) -> Program:
    strategies = _STRATEGIES.format(attention=attention, after=after[0], back=after[1])
    plan: Plan = context_plan(strategies, layout=layout, sequence=sequence)
    program = read(_LAYER.format(causal=causal))
    for step in (ShardParameters("cp"), InsertConversions("cp"), CutSequence()):
        program = step.apply(program, plan)
    return program


def lines_of(program: Program) -> list[str]:
    """The lines of its text, without the placements over cp that it had."""
    return [re.sub(r" [\w()]+@cp", "", line).strip() for line in program_text(program).splitlines()]


def test_a_ring_has_its_own_part_of_keys_and_values() -> None:
    program = cut("S(2), S(2), S(2) -> S(2)", causal=True, layout="ring")
    lines = lines_of(program)
    assert "h: [b, s, 2, 4] = reshape(y, [b, s, 2, 4])" in lines
    assert any(line.startswith("a: [b, 2, s, 4] = ring_attention(q, q, q, ") for line in lines)
    assert program.zigzag and "zigzag=True" in "".join(lines) and "ranks=2" in "".join(lines)


def test_keys_and_values_that_are_gathered_have_the_whole_sequence() -> None:
    lines = lines_of(cut("S(2), Rp, Rp -> S(2)", causal=True, layout="all_gather"))
    assert "convert: [b, 2, 2*s, 4] = convert(q, S(2), Rp, cp)" in lines
    assert any(line.startswith("a: [b, 2, s, 4] = gathered_attention(q, convert, convert, ") for line in lines)


def test_without_a_mask_gathered_keys_need_no_other_attention() -> None:
    program = cut("S(2), Rp, Rp -> S(2)", causal=False, layout="all_gather")
    assert any("= scaled_dot_product_attention(q, convert, convert" in line for line in lines_of(program))
    assert not program.zigzag


def test_heads_are_exchanged_for_the_sequence() -> None:
    program = cut("S(1), S(1), S(1) -> S(1)", causal=True, layout="ulysses", after=(1, 2))
    lines = lines_of(program)
    assert "convert: [b, 1, 2*s, 4] = convert(q, S(2), S(1), cp)" in lines
    assert "t: [b, 2*s, 1, 4] = transpose(a, 1, 2)" in lines
    assert "convert_1: [b, s, 2, 4] = convert(t, S(2), S(1), cp)" in lines
    assert not program.zigzag  # the shards of heads are in order


def test_zigzag_needs_an_even_number_of_chunks() -> None:
    with pytest.raises(PlanError, match="sequence=6 is not divisible by 2 × cp=2.*use 4 or 8"):
        cut("S(2), S(2), S(2) -> S(2)", causal=True, layout="ring", sequence=6)
    assert not cut("S(2), S(2), S(2) -> S(2)", causal=False, layout="ring", sequence=6).zigzag


def test_a_module_that_is_kept_whole_is_refused() -> None:
    """Its gradients would be whole on each rank, and summed."""
    program = replace(read(_LAYER.format(causal=True)), opaque={"router": OpaqueCall("layers.0.router", ((), {}))})
    with pytest.raises(PlanError, match="cp=2: router is kept whole, so its gradients would count 2 times: use cp=1"):
        CutSequence().apply(program, context_plan())


def test_one_rank_has_the_whole_sequence() -> None:
    program = read(_LAYER.format(causal=True))
    assert CutSequence().apply(program, context_plan(cp=1)) is program


_WINDOW = """
block tables:
  p: [s] int = arange(s)
  i: [s, 1] int = unsqueeze(p, 1)
  j: [1, s] int = unsqueeze(p, 0)
  le: [s, s] bool = le.Tensor(j, i)
  m: [s, s] bool = triu(le, {first})
  return m

block Layer:
  x: [b, 2, s, 4] = value 0
  mask: [s, s] bool = value 1
  a: [b, 2, s, 4] = scaled_dot_product_attention(x, x, x, mask)
  return a

mask = tables()
y1 = Layer(y0, mask)  # layers.0
y2 = Layer(y1, mask)  # layers.1
"""
_TABLES = "\n".join(f"tables.{name}: {kind}" for name, kind in {
    "p": "-> R", "i": "R -> R", "j": "R -> R", "le": "R, R -> R", "m": "R -> R"}.items())  # fmt: skip


def cut_window(attention: str, layout: str, window: int, sequence: int = 16, cp: int = 2) -> Program:
    strategies = f"{_TABLES}\nLayer.x: -> S(2)\nLayer.mask: -> R\nLayer.a: {attention}"
    program = read(_WINDOW.format(first=1 - window))
    (node,) = program.blocks["Layer"].ops
    update_info(node, window=window)
    plan = context_plan(strategies, cp=cp, layout=layout, sequence=sequence)
    for step in (ShardParameters("cp"), InsertConversions("cp"), CutSequence()):
        program = step.apply(program, plan)
    return program


def test_a_window_needs_no_mask() -> None:
    """Nor do the tables that only made it."""
    program = cut_window("S(2), S(2), S(2), R -> S(2)", "ring", window=4)
    assert set(program.blocks) == {"Layer"} and [c.inputs for c in program.calls] == [("y0",), ("y1",)]
    assert not program.zigzag  # each row has 4 keys, or fewer, in either order
    (line,) = (line for line in lines_of(program) if "ring_attention" in line)
    assert "is_causal=True" in line and "window=4" in line and "hops=1" in line and "#" not in line
    program = cut_window("S(2), Rp, Rp, R -> S(2)", "all_gather", window=4)
    assert "gathered_attention(x, convert, convert, " in "".join(lines_of(program)) and "tables" not in program.blocks


@pytest.mark.parametrize(("window", "zigzag"), [(4, False), (5, True), (15, True)])
def test_a_long_window_wants_equal_work(window: int, zigzag: bool) -> None:
    program = cut_window("S(2), S(2), S(2), R -> S(2)", "ring", window)
    assert program.zigzag is zigzag and f"zigzag={zigzag}, " in "".join(lines_of(program))


@pytest.mark.parametrize("window", [16, 17])
def test_a_window_of_the_whole_sequence_is_plain_causal(window: int) -> None:
    program = cut_window("S(2), S(2), S(2), R -> S(2)", "ring", window)
    assert program.zigzag and "window" not in "".join(lines_of(program))


def test_heads_exchanged_for_the_sequence_meet_the_mask() -> None:
    program = cut_window("S(1), S(1), S(1), R -> S(1)", "ulysses", window=4)
    assert "scaled_dot_product_attention(convert, convert, convert, mask)  # window=4" in "\n".join(lines_of(program))
    assert "tables" in program.blocks and not program.zigzag


@pytest.mark.parametrize(("cp", "window", "hops"), [(2, 4, 1), (4, 2, 1), (4, 5, 1), (4, 6, 2), (4, 16, 3)])
def test_keys_are_passed_on_as_far_as_the_window_reaches(cp: int, window: int, hops: int) -> None:
    """In order, where it is short, of 4 tokens a rank; else to all ranks."""
    program = cut_window("S(2), S(2), S(2), R -> S(2)", "ring", window, sequence=4 * cp, cp=cp)
    assert f"hops={hops}" in "".join(lines_of(program))
