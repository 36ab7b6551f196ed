"""Cut a traced model into prologue, layers and epilogue, and find which layers are the same.

Layers are items of module lists (see `lists`), by the module path of each op. Two layers are of one class when
their ops, arguments, parameter names (without the index) and readers of outside values agree.
Values that need neither parameters nor the hidden state (RoPE tables, positions, masks) form the block
"tables", which every stage computes for itself.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..ir.graph import (
    BETWEEN,
    COUNT,
    EPILOGUE,
    MODEL,
    PROLOGUE,
    TABLES,
    Block,
    Call,
    NodeInfo,
    Program,
    Role,
    info,
    node_inputs,
    op_name,
    set_info,
)
from ..ir.identifiers import identifier
from ..rules import has_rule, rule_of
from .lists import LayerLists, layer_lists
from .repeats import complete, is_stand_in, same_given, stand_in_call
from .segments import Segment, segments

aten = torch.ops.aten

_NOT_LAYERS = (MODEL, TABLES, PROLOGUE, EPILOGUE, COUNT)

# The op that a module is named for; others in it carry their own name too.
_MAIN_OPS = {"linear", "layer_norm", "rms_norm", "embedding", "scaled_dot_product_attention", "conv2d"}


def split_layers(program: Program, class_names: dict[str, str]) -> Program:
    """The program as calls of blocks. `class_names` maps a layer's module path to its Python class name."""
    program = same_given(program)
    split, uneven = _split(program, class_names, frozenset())
    return _split(program, class_names, uneven)[0] if uneven else split


def _split(program: Program, class_names: dict[str, str], apart: frozenset[str]) -> tuple[Program, frozenset[str]]:
    """The program as calls of blocks, the items of the lists `apart` as ops of the model; and its uneven lists."""
    lists = layer_lists({name: facts.shape for name, facts in program.parameters.items()})
    block = _lift_shared(program.blocks[MODEL], lists)
    runs = [segment for segment in segments(block, lists) if segment.nodes]
    made: dict[tuple[Any, ...], Block] = {}
    blocks = {name: b for name, b in program.blocks.items() if name != MODEL}
    calls: list[Call] = []
    tables = {node.name for segment in runs if segment.path == TABLES for node in segment.nodes}
    for segment in runs:
        if any(is_stand_in(node) for node in segment.nodes):
            calls.append(stand_in_call(segment.path, segment.nodes, calls))
            continue
        is_layer = segment.is_layer and _list_of(segment.path) not in apart
        path = segment.path if is_layer else ""
        name = class_names.get(path, "Layer") if is_layer else BETWEEN if segment.is_layer else segment.path
        new, inputs, outputs = _extract(segment, path, name, block)
        key = (*_fingerprint(new), *(v for v in inputs if v in tables))
        if is_layer and key in made:
            new = made[key]
        else:
            name = _unique(name, blocks)
            new = made[key] = Block(name, new.graph)
            blocks[name] = new
        calls.append(Call(new.name, _first_path(path, new, program.tied, lists), inputs, outputs))
    program = replace(program, blocks=blocks, calls=tuple(calls))
    program = complete(program, [s.path for s in runs if any(map(is_stand_in, s.nodes))])
    return program, _uneven_lists(calls, runs)


def _uneven_lists(calls: list[Call], runs: list[Segment]) -> frozenset[str]:
    """Lists with a layer object that is called as several classes, where a module has one forward.

    So it is where only later uses get a hidden state with a gradient, or a value that the first has made.
    """
    classes: dict[str, set[str]] = {}
    lists: dict[str, set[str]] = {}
    for call, segment in zip(calls, runs, strict=True):
        if call.path:
            classes.setdefault(call.path, set()).add(call.block)
            lists.setdefault(call.path, set()).update((_list_of(call.path), _list_of(segment.path)))
    return frozenset().union(*(lists[path] for path, names in classes.items() if len(names) > 1))


def _list_of(path: str) -> str:
    """The list that the layer at a path is in."""
    return path.rpartition(".")[0]


def _lift_shared(block: Block, lists: LayerLists) -> Block:
    """A parameter or buffer that layers read but do not own becomes a value, made before the first layer.

    Layers read also what the model's ops among theirs read.
    """
    block = block.copy()
    while foreign := _foreign(segments(block, lists)):
        first = block.ops[0]
        for node, readers in foreign.items():
            with block.graph.inserting_before(first):
                # A copy of a parameter: what a stage sends on must outlive ZeRO-3's whole parameters.
                copy = aten.clone.default if info(node).role is Role.PARAMETER else aten.alias.default
                value = block.graph.call_function(copy, (node,))
            set_info(value, replace(info(node), role=Role.OP, ref="", module=""))
            for reader in readers:
                reader.replace_input_with(node, value)
    return block


def _foreign(runs: list[Segment]) -> dict[fx.Node, list[fx.Node]]:
    """Each parameter or buffer that layers read but do not own, with its readers in them."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for segment in runs:
        for reader in segment.nodes if segment.is_layer else ():
            for node in reader.all_input_nodes:
                kept = info(node).role in (Role.PARAMETER, Role.BUFFER)
                if kept and not info(node).ref.startswith(f"{segment.path}."):
                    found.setdefault(node, []).append(reader)
    return found


def _first_path(path: str, block: Block, tied: dict[str, str], lists: LayerLists) -> str:
    """The path of the layer object: that of its first use, where a model uses one object several times.

    A layer that shares only some of its parameters keeps its own path, and copies of these that are kept equal.
    """
    names = [f"{path}.{info(n).ref}" for n in block.placeholders(Role.PARAMETER)]
    shared = [n for n in names if n in tied]
    first = lists.layer(tied[shared[0]]) if shared else None
    whole = first and all(tied.get(n) == first + n.removeprefix(path) for n in names)
    return first if first and whole else path


def _extract(segment: Segment, path: str, name: str, block: Block) -> tuple[Block, tuple[str, ...], tuple[str, ...]]:
    """The segment as a block of its own, with the names of the values it reads and gives."""
    graph = fx.Graph()
    own = set(segment.nodes)
    mapping: dict[fx.Node, fx.Node] = {}
    inputs: list[str] = []
    for node in segment.nodes:
        for operand in node.all_input_nodes:
            if operand in own or operand in mapping:
                continue
            facts = info(operand)
            if facts.role in (Role.PARAMETER, Role.BUFFER):
                facts = replace(facts, ref=_relative(facts.ref, path))
            elif facts.role is not Role.INPUT:
                facts = NodeInfo(
                    facts.shape, facts.dtype, facts.requires_grad, Role.VALUE, str(len(inputs)), facts.module
                )
                inputs.append(operand.name)
            mapping[operand] = set_info(graph.placeholder(_placeholder_name(operand, facts)), facts)
    for node in segment.nodes:
        facts = replace(info(node), module=_relative(info(node).module, path))
        args = fx.node.map_arg(node.args, lambda n: mapping[n])
        kwargs = fx.node.map_arg(node.kwargs, lambda n: mapping[n])
        new = graph.create_node(node.op, node.target, args, kwargs, name=_node_name(node, facts.module))
        mapping[node] = set_info(new, facts)
    results = [n for n in segment.nodes if any(u not in own for u in n.users)]
    graph.output(tuple(_outliving(mapping[n]) for n in results))
    is_loss = any(u.op == "output" for n in results for u in n.users)
    return Block(name, graph), tuple(inputs), () if is_loss else tuple(n.name for n in results)


def _outliving(result: fx.Node) -> fx.Node:
    """What leaves a block: of a view of a parameter a copy, for ZeRO-3 frees whole parameters after their block."""
    base = result
    while base.op == "call_function" and _is_view(base):
        base = node_inputs(base)[0]
    if info(base).role is not Role.PARAMETER:
        return result
    with result.graph.inserting_after(result):
        return set_info(result.graph.call_function(aten.clone.default, (result,)), info(result))


def _is_view(node: fx.Node) -> bool:
    """Whether a result may share memory with the first operand, by the rule or by what torch says of the op."""
    if not node_inputs(node):
        return False
    returns = getattr(getattr(node.target, "_schema", None), "returns", ())
    return (has_rule(node) and rule_of(node).kind == "view") or any(r.alias_info is not None for r in returns)


def _placeholder_name(node: fx.Node, facts: NodeInfo) -> str:
    """Plans refer to placeholders by these names: they must not depend on the number of layers."""
    return f"value_{facts.ref}" if facts.role is Role.VALUE else facts.ref.replace(".", "_")


def _node_name(node: fx.Node, module: str) -> str:
    """A stable name for plans to refer to: the module's leaf for its main op, else leaf and op."""
    leaf = module.rpartition(".")[2] or "root"
    op = op_name(node)
    return leaf if op in _MAIN_OPS else f"{leaf}_{op}"


def _relative(name: str, path: str) -> str:
    if path and name == path:
        return ""
    return name.removeprefix(f"{path}.") if path else name


def _fingerprint(block: Block) -> tuple[Any, ...]:
    """What makes two layers the same class: everything but the names of values."""
    number = {node: i for i, node in enumerate(block.graph.nodes)}

    def show(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return f"%{number[argument]}"
        if isinstance(argument, list | tuple):
            return tuple(show(a) for a in argument)
        return str(argument)

    lines: list[Any] = []
    for node in block.graph.nodes:
        facts = info(node) if node.op != "output" else None
        what = (facts.shape, facts.dtype, facts.role, facts.ref, facts.requires_grad, facts.window) if facts else ()
        lines.append((str(node.target) if node.op == "call_function" else "", show(node.args), str(what)))
        lines.append(show(tuple(sorted(node.kwargs.items()))))
    return tuple(lines)


def _unique(name: str, taken: dict[str, Block]) -> str:
    if name not in taken:
        return name
    return next(f"{name}{i}" for i in range(2, 1000) if f"{name}{i}" not in taken)


def class_names(model: torch.nn.Module) -> dict[str, str]:
    """Module path → Python class name, an identifier that is the name of no other block."""
    return {path: _block_name(type(module).__name__) for path, module in model.named_modules()}


def _block_name(name: str) -> str:
    name = identifier(name, "Layer")
    return f"{name}Layer" if re.fullmatch(f"{'|'.join(_NOT_LAYERS)}|{BETWEEN}\\d*", name) else name
