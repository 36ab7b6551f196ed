"""Print → parse → the same program, over every family of tests/zoo.py and over programs drawn by hypothesis."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from autopar.compile.compiler import prepare
from autopar.ir.custom import OpaqueCall
from autopar.ir.graph import B, Block, NodeInfo, Program, Role, S
from autopar.ir.reader import UnwrittenError, read_program, write_program
from tests import zoo
from tests.passes.programs import read


def assert_same(one: Any, other: Any, where: str = "program") -> None:
    """Equal in every field, type and order, however deep; graphs node by node."""
    if isinstance(one, Block):
        assert one.name == other.name, where
        one, other = ([_facts_of(node) for node in block.graph.nodes] for block in (one, other))
    if isinstance(one, fx.Node):
        assert one.name == other.name, where
    elif is_dataclass(one):
        assert type(one) is type(other), where
        for field in fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name), f"{where}.{field.name}")
    elif isinstance(one, tuple | list):
        assert isinstance(other, tuple) is isinstance(one, tuple) and len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    elif isinstance(one, dict):
        assert_same([*one.items()], [*other.items()], where)
    elif isinstance(one, torch.Tensor):
        assert (one.device, one.shape) == (other.device, other.shape), where
    else:
        assert type(one) is type(other) and (one == other or one != one), f"{where}: {one!r} and {other!r}"


def _facts_of(node: fx.Node) -> dict[str, Any]:
    """All of a node, whatever writes it: `meta` too, where nothing but a NodeInfo is to be."""
    names = ("name", "op", "target", "args", "kwargs", "type", "meta")
    return {name: dict(node.meta) if name == "meta" else getattr(node, name) for name in names}


def assert_read_back(program: Program) -> None:
    text = write_program(program)
    again = read_program(text)
    assert_same(program, again)
    assert write_program(again) == text


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("name", zoo.FAMILIES)
def test_a_prepared_program_is_read_as_it_is_written(name: str) -> None:
    family = zoo.FAMILIES[name]
    inputs = family.inputs(2, torch.Generator().manual_seed(0))
    assert_read_back(prepare(family.build(), {**inputs, **family.arguments}, "bf16", "synchronise"))


_NUMBERS = st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.text(max_size=8))
_ARGUMENTS = st.recursive(_NUMBERS, lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner), max_leaves=5)
_SIZE_PARTS = st.sampled_from([B, S, sympy.Integer(3), S / 2, sympy.floor(S / 4)])
_SIZES = st.lists(_SIZE_PARTS, min_size=1, max_size=3).map(lambda parts: sympy.Add(*parts) * parts[0])
_FACTS = st.builds(
    NodeInfo, st.lists(_SIZES, max_size=3).map(tuple), st.sampled_from([torch.bfloat16, torch.int64, torch.bool]),
    st.booleans(), ref=st.text(max_size=6), module=st.text(max_size=6), source=st.text(max_size=20),
    window=st.none() | st.integers(1, 9),
)  # fmt: skip


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Programs of one block that no model has, with names and values that a text could take for something else."""
    graph = fx.Graph()
    names = st.sampled_from(["b", "s", "node", "x", "int64", "Role", "Tensor", "mul", "mul_1", "placeholder"])
    nodes = [graph.placeholder(draw(names)) for _ in range(draw(st.integers(1, 4)))]
    for _ in range(draw(st.integers(0, 5))):
        operand, target = draw(st.sampled_from(nodes)), draw(st.sampled_from([torch.ops.aten.mul.Tensor, *_FUNCTIONS]))
        args = (operand, draw(_ARGUMENTS), [draw(st.sampled_from(nodes)), draw(_SIZES)])
        nodes.append(graph.create_node("call_function", target, args, {"dim": draw(_ARGUMENTS)}, draw(names)))
    for node in nodes:
        node.meta["autopar"] = draw(_FACTS)
    graph.output((nodes[-1],))
    return Program("M", {"model": Block("model", graph)}, (), {}, {}, {}, checks=(draw(st.text()),))


_FUNCTIONS = [torch.ops.aten.sum.dim_IntList, torch.ops.autopar.experts.default]


@settings(max_examples=150, deadline=None)
@given(programs())
def test_programs_that_no_model_has_are_too(program: Program) -> None:
    assert_read_back(program)


def test_an_opaque_call_is_written_but_for_a_class() -> None:
    program = read("block model:\n  x: [b] = input x\n  return x")
    call = OpaqueCall("mlp", ((torch.empty(0, device="meta"), 2), {"scale": 1.5}), "why")
    assert_read_back(Program("M", program.blocks, program.calls, {}, {}, {}, opaque={"mlp": call}))
    kept = Program("M", program.blocks, program.calls, {}, {}, {}, opaque={"f": OpaqueCall("f", ((), {}), "", Role)})
    with pytest.raises(UnwrittenError, match="which no text can"):
        write_program(kept)


@pytest.mark.parametrize(
    "line",
    [
        "name = __import__('os').system('true')", "name = open('x')", "import os", "name = (lambda: 1)()",
        "name = Role.__class__.__mro__", "def model():\n    x: NodeInfo((b,), int64) = os.system('true')",
        "def model():\n    x: NodeInfo((b,), int64) = aten.add.nothing(1)", "name = [x for x in 'ab']", "name = f'{1}'",
    ],
)  # fmt: skip
def test_a_text_is_not_run(line: str) -> None:
    with pytest.raises((ValueError, AttributeError, KeyError), match="line|KeyError|attribute|__"):
        read_program(line)
