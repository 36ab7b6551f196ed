"""A program as text that holds all of it, and the program that such a text describes: a file of Python's syntax.

    name = 'Model'
    parameters = {'w': TensorInfo((16, 8), float64, True)}
    calls = (Call('model', ''),)

    def model():
        x: NodeInfo((b, s, 8), float64, role=Role.INPUT, ref='x') = placeholder('x')
        w: NodeInfo((16, 8), float64, True, Role.PARAMETER, 'w') = placeholder('w')
        y: NodeInfo((b, s, 16), float64, True) = aten.linear.default(x, w)
        return (y,)

The text is parsed, never run: a name means a node, a size, a dtype or a class of `_CLASSES`, and what is called in a
block is an op that torch has registered or one of `ir.ops`. `program_text` is the short form, for people.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any

import sympy
import torch
from torch import fx

from ..placement import Kind, Placement, Strategy
from ..plan.recompute import RecomputeChoice, RecomputeRegion
from . import ops
from .custom import OpaqueCall
from .graph import B, Block, Call, Fused, NodeInfo, Program, Role, S, Stage, TensorInfo, info, set_info
from .lengths import FixedLength, Padding

_CLASSES = {
    c.__name__: c
    for c in (
        Call, FixedLength, Fused, Kind, NodeInfo, OpaqueCall, Padding, Placement, RecomputeChoice, RecomputeRegion,
        Role, Stage, Strategy, TensorInfo,
    )
}  # fmt: skip
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_FORMATS = {str(f).removeprefix("torch."): f for f in vars(torch).values() if isinstance(f, torch.memory_format)}
_SIZES = {
    f.__name__: f for f in (sympy.floor, sympy.ceiling, sympy.Mod, sympy.Max, sympy.Min, sympy.Integer, sympy.sqrt)
}
_NAMES: dict[str, Any] = {
    "b": B, "s": S, "inf": float("inf"), "nan": float("nan"), "Tensor": None, **_DTYPES, **_FORMATS, **_SIZES,
    **_CLASSES,
}  # fmt: skip
_NODE = "node"  # `node.b`: a node whose name means something else
_FUNCTIONS: dict[str, Any] = {
    "getitem": operator.getitem, "convert": ops.convert, "ring_attention": ops.ring_attention,
    "gathered_attention": ops.gathered_attention, **ops.COLLECTIVES,
}  # fmt: skip
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow,
    ast.Div: lambda a, b: sympy.Integer(a) / b if isinstance(a, int) else a / b,
}  # fmt: skip


class UnwrittenError(ValueError):
    """A program holds something that no text can: a live class or module."""


# --------------------------------------------------------------------------------
# Program → text


def write_program(program: Program) -> str:
    """The whole program as text; UnwrittenError where that is not possible."""
    given = [f"{f.name} = {write(getattr(program, f.name))}" for f in fields(program) if f.name != "blocks"]
    return "\n\n".join(["\n".join(given), *map(_write_block, program.blocks.values())]) + "\n"


def _write_block(block: Block) -> str:
    lines = [f"def {block.name}():"]
    for node in block.graph.nodes:
        arguments = [write(a) for a in node.args] + [f"{k}={write(v)}" for k, v in node.kwargs.items()]
        if node.op == "output":
            lines.append(f"return {write(node.args[0])}")
            continue
        arguments = [repr(node.target)] if node.op == "placeholder" else arguments
        called = "placeholder" if node.op == "placeholder" else _function_name(node.target)
        lines.append(f"{node.name}: {write(info(node))} = {called}({', '.join(arguments)})")
    return "\n    ".join(lines)


def _function_name(target: Any) -> str:
    name: str = str(target) if isinstance(target, torch._ops.OpOverload) else target.__name__
    if _function(name) is not target:
        raise UnwrittenError(f"{target} is no op that a text can name")
    return name


def write(value: Any) -> str:
    """A value as the expression that means it; UnwrittenError for what is not plain data."""
    if isinstance(value, fx.Node):
        return f"{_NODE}.{value.name}" if value.name in {*_NAMES, _NODE} else value.name
    if isinstance(value, tuple | list):
        items = ", ".join(map(write, value))
        return f"[{items}]" if isinstance(value, list) else f"({items},)" if len(value) == 1 else f"({items})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{write(k)}: {write(v)}' for k, v in value.items())}}}"
    if isinstance(value, Enum) and type(value).__name__ in _CLASSES:
        return f"{type(value).__name__}.{value.name}"
    if _CLASSES.get(type(value).__name__) is type(value) and is_dataclass(value):
        return _write_record(value)
    return _write_leaf(value)


def _write_leaf(value: Any) -> str:
    if isinstance(value, sympy.Expr):
        return f"Integer({value})" if isinstance(value, sympy.Integer) else str(value)
    if isinstance(value, torch.dtype | torch.memory_format):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.Tensor) and value.is_meta and value.shape == (0,):
        return "Tensor()"  # where an opaque module is given a tensor
    if type(value) in (int, float, bool, str, type(None)):
        return repr(value)
    raise UnwrittenError(f"a program holds {value!r}, which no text can")


def _write_record(value: Any) -> str:
    """Fields without a default by place, the others by name where they differ from it; shapes with plain numbers."""
    written = []
    for field in fields(value):
        content = getattr(value, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if field.name == "shape":
            written.append(str(content))
        elif default is MISSING:
            written.append(write(content))
        elif content != default:
            written.append(f"{field.name}={write(content)}")
    return f"{type(value).__name__}({', '.join(written)})"


# --------------------------------------------------------------------------------
# Text → program


def read_program(text: str) -> Program:
    """The program that a text describes; ValueError, with the line, for what is none."""
    given: dict[str, Any] = {"blocks": {}}
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.FunctionDef):
            given["blocks"][statement.name] = Block(statement.name, _read_graph(statement.body))
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            given[statement.targets[0].id] = read(statement.value)
        else:
            raise _unknown(statement)
    return Program(**given)


def _read_graph(lines: list[ast.stmt]) -> fx.Graph:
    graph, nodes = fx.Graph(), dict[str, fx.Node]()
    for line in lines:
        match line:
            case ast.Return(value=ast.expr() as value):
                graph.output(read(value, nodes))
            case ast.AnnAssign(target=ast.Name(id=name), annotation=facts, value=ast.Call() as call):
                nodes[name] = set_info(_read_node(graph, name, call, nodes), read(facts, nodes))
            case _:
                raise _unknown(line)
    return graph


def _read_node(graph: fx.Graph, name: str, call: ast.Call, nodes: Mapping[str, fx.Node]) -> fx.Node:
    called = ast.unparse(call.func)
    args = tuple(read(a, nodes) for a in call.args)
    if called == "placeholder":
        node = graph.create_node("placeholder", args[0], name=name)
    elif (target := _function(called)) is not None:
        node = graph.create_node("call_function", target, args, _keywords(call, nodes), name)
    else:
        raise _unknown(call)
    if node.name != name:
        raise ValueError(f"line {call.lineno}: no node can be named {name}")
    return node


def _function(name: str) -> Any:
    """The op of a name, "aten.add.Tensor" or "gather"; None where there is none."""
    if name in _FUNCTIONS or name.count(".") != 2:
        return _FUNCTIONS.get(name)
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, torch._ops.OpOverload) else None


def read(value: ast.expr, nodes: Mapping[str, fx.Node] | None = None) -> Any:
    """The value of an expression as `write` writes it, in a block of `nodes`."""
    nodes = nodes or {}
    match value:
        case ast.Constant():
            return value.value
        case ast.Name(id=name) if name in _NAMES or name in nodes:
            return _NAMES.get(name, nodes.get(name))
        case ast.Attribute(value=ast.Name(id="node"), attr=name) if name in nodes:
            return nodes[name]
        case ast.Attribute(value=ast.Name(id=("Role" | "Kind") as kind), attr=name):
            return (Role if kind == "Role" else Kind)[name]
        case ast.Tuple(elts=items):
            return tuple(read(i, nodes) for i in items)
        case ast.List(elts=items):
            return [read(i, nodes) for i in items]
        case ast.Dict(keys=keys, values=values):
            return {read(k, nodes): read(v, nodes) for k, v in zip(keys, values, strict=True) if k is not None}
    return _read_made(value, nodes)


def _read_made(value: ast.expr, nodes: Mapping[str, fx.Node]) -> Any:
    """A size, a negative number, or an object of `_CLASSES`."""
    match value:
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -read(operand, nodes)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](read(left, nodes), read(right, nodes))
        case ast.Call(func=ast.Name(id="Tensor")):
            return torch.empty(0, device="meta")
        case ast.Call(func=ast.Name(id=name), args=args) if name in _CLASSES or name in _SIZES:
            given = [read(a, nodes) for a in args]
            if name in ("NodeInfo", "TensorInfo"):
                given[0] = tuple(map(sympy.sympify, given[0]))
            return _NAMES[name](*given, **_keywords(value, nodes))
    raise _unknown(value)


def _keywords(call: ast.Call, nodes: Mapping[str, fx.Node]) -> dict[str, Any]:
    return {str(k.arg): read(k.value, nodes) for k in call.keywords}


def _unknown(part: ast.stmt | ast.expr) -> ValueError:
    return ValueError(f"line {part.lineno} is not of a program: {ast.unparse(part)[:80]}")
