"""Sizes and literals as Python: what the text evaluates to is the value."""

from __future__ import annotations

import ast
import math
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv, Mod

from autopar.emit.text import attribute, commented, docstring, fenced, literal, quoted, size_from, size_text
from autopar.errors import PlanError
from autopar.ir.counts import dims_of
from autopar.ir.graph import B, S

SIZES = {
    "64": sympy.Integer(64),
    "s": S,
    "b * s": B * S,
    "s // 2": S / 2,
    "b * s // 2": B * S / 2,
    "(s + 2) // 4": (S + 2) / 4,
    "s**2": S**2,
    "b * s**2": B * S**2,
    "(b + s)**2": (B + S) ** 2,
    "s - 1": S - 1,
    "2 * s + 1": 2 * S + 1,
    "b * (s + 1)": B * (S + 1),
    "-s": -S,
    "s // 3": FloorDiv(S, 3),
    "b * (s // 3)": B * FloorDiv(S, 3),
    "s - s // 3": S - FloorDiv(S, 3),
    "-(s // 3)": -FloorDiv(S, 3),
    "s % 3": Mod(S, 3),
    "max(b, s)": sympy.Max(B, S),
}


@pytest.mark.parametrize("text", SIZES)
def test_sizes(text: str) -> None:
    expr = SIZES[text]
    assert size_text(expr) == text
    for b, s in ((4, 6), (6, 10), (8, 2)):
        assert eval(text, {"b": b, "s": s}) == expr.subs({B: b, S: s})


def test_a_size_without_a_form_is_refused() -> None:
    with pytest.raises(PlanError, match=r"log\(s\)"):
        size_text(sympy.log(S))


@pytest.mark.parametrize("value", [1, -0.5, True, None, math.inf, -math.inf, 'a "quoted" \\ word', (1, 2.5), (S.name,)])
def test_literals_evaluate_to_the_value(value: Any) -> None:
    assert eval(literal(value)) == value


def test_literals_of_torch_and_not_a_number() -> None:
    assert literal(torch.bfloat16) == "torch.bfloat16"
    assert math.isnan(eval(literal(math.nan)))


def test_a_value_without_a_literal_is_refused() -> None:
    """Neither its repr nor that of what is inside a list gets into source."""
    with pytest.raises(PlanError, match="has no form in the emitted program"):
        literal({"lr": [torch.zeros(1)]})
    with pytest.raises(sympy.SympifyError):
        size_text("__import__('os')")


# --------------------------------------------------------------------------------
# Names


AWKWARD = st.text(st.characters() | st.sampled_from("\\'\"`{}#\n\r"), max_size=6)


@given(AWKWARD)
def test_a_string_is_itself_on_one_line(text: str) -> None:
    source = quoted(text)
    assert ast.literal_eval(source) == text and literal([text]) == f"({source},)"
    assert source.isprintable() and source[0] == source[-1] == '"'


@given(AWKWARD, AWKWARD, AWKWARD)
def test_nothing_ends_a_docstring_or_comment(first: str, row: str, comment: str) -> None:
    for lines in (docstring(first), docstring(first, [row, row])):
        source = "\n".join([*lines, f"x = 1  # {commented(comment)}"])
        doc, assignment = ast.parse(source).body
        assert isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(assignment, ast.Assign)
        assert len(source.splitlines()) == len(lines) + 1


@given(AWKWARD)
def test_nothing_ends_a_block_of_markdown(text: str) -> None:
    fence, *inside, end = fenced(text).split("\n")
    assert fence == end and set(fence) == {"`"} and fence not in "\n".join(inside)


def test_attributes() -> None:
    assert attribute("layers.3.mlp.weight", "parameter") == "self.layers[3].mlp.weight"
    for path in ("0.weight", "a-b.weight", "layers.007.x", "x.class", "x.__y", "x.\ufb01"):
        assert attribute(path, "buffer") == f"self.get_buffer({quoted(path)})"


@pytest.mark.parametrize(
    ("size", "source"),
    [
        (S, "x.shape[1]"),
        (4 * S, "x.shape[1] // 4"),
        (S / 2, "x.shape[1] * 2"),
        (S + 4, "x.shape[1] - 4"),
        (S / 2 + 2, "(x.shape[1] - 2) * 2"),
        (3 * S / 2 + 1, "(x.shape[1] - 1) * 2 // 3"),
    ],
)
def test_a_size_is_read_off_one_that_it_is_part_of(size: sympy.Expr, source: str) -> None:
    assert size_from("x.shape[1]", size, S) == source


def test_the_plainest_dim_tells_a_size() -> None:
    assert dims_of((B, S + 4, S, 16)) == {B: 0, S: 2}
    assert dims_of((B * S, S + 4)) == {S: 1}
    assert dims_of((B * S, sympy.Integer(16))) == {}
