"""Cut a traced model into prologue, layers and epilogue, and find which layers are the same.

Layers are the items of the outermost module list, by the module path of each op. Two layers are of one
class when their ops, arguments, parameter names (without the index) and readers of outside values agree.
Values that need neither parameters nor the hidden state (RoPE tables, positions, masks) form the block
"tables", which every stage computes for itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ..ir.graph import (
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
    is_count,
    op_name,
    set_info,
)
from .repeats import complete, is_stand_in, stand_in_call

aten = torch.ops.aten

# The op that a module is named for; others in it carry their own name too.
_MAIN_OPS = {"linear", "layer_norm", "rms_norm", "embedding", "scaled_dot_product_attention", "conv2d"}


@dataclass
class _Segment:
    """The ops of one call, in graph order, before they become a block."""

    path: str
    nodes: list[fx.Node] = field(default_factory=list)


def split_layers(program: Program, class_names: dict[str, str]) -> Program:
    """The program as calls of blocks. `class_names` maps a layer's module path to its Python class name."""
    block = _lift_shared(program.blocks[MODEL])
    segments = _segments(block)
    made: dict[tuple[Any, ...], Block] = {}
    blocks = {name: b for name, b in program.blocks.items() if name != MODEL}
    calls: list[Call] = []
    tables = {node for segment in segments if segment.path == TABLES for node in segment.nodes}
    for segment in segments:
        if not segment.nodes:
            continue
        layer = segment.path not in (TABLES, PROLOGUE, EPILOGUE)
        if any(is_stand_in(node) for node in segment.nodes):
            calls.append(stand_in_call(segment.path, segment.nodes, calls))
            continue
        path = segment.path if layer else ""
        name = class_names.get(segment.path, "Layer") if layer else segment.path
        new, inputs, outputs = _extract(segment, path, name, block)
        key = (*_fingerprint(new), *(v for v in inputs if v in {n.name for n in tables}))
        if layer and key in made:
            new = made[key]
        else:
            name = _unique(name, blocks)
            new = made[key] = Block(name, new.graph)
            blocks[name] = new
        calls.append(Call(new.name, _first_path(path, new, program.tied), inputs, outputs))
    program = replace(program, blocks=blocks, calls=tuple(calls))
    return complete(program, [s.path for s in segments if any(map(is_stand_in, s.nodes))])


def _lift_shared(block: Block) -> Block:
    """A parameter or buffer that layers read but do not own becomes a value, made before the first layer."""
    block = block.copy()
    first = block.ops[0]
    for node in block.placeholders(Role.PARAMETER, Role.BUFFER):
        ref = info(node).ref
        paths = {user: layer_path(info(user).module) for user in node.users}
        readers = [user for user, path in paths.items() if path and not ref.startswith(f"{path}.")]
        if readers:
            with block.graph.inserting_before(first):
                # A copy of a parameter: what a stage sends on must outlive ZeRO-3's whole parameters.
                copy = aten.clone.default if info(node).role is Role.PARAMETER else aten.alias.default
                value = block.graph.call_function(copy, (node,))
            set_info(value, replace(info(node), role=Role.OP, ref="", module=""))
            for reader in readers:
                reader.replace_input_with(node, value)
    return block


def _first_path(path: str, block: Block, tied: dict[str, str]) -> str:
    """The path of the layer object: that of its first use, where a model uses one object several times.

    A layer that shares only some of its parameters keeps its own path, and copies of these that are kept equal.
    """
    names = [f"{path}.{info(n).ref}" for n in block.placeholders(Role.PARAMETER)]
    shared = [n for n in names if n in tied]
    first = layer_path(tied[shared[0]]) if shared else None
    whole = first and all(tied.get(n) == first + n.removeprefix(path) for n in names)
    return first if first and whole else path


def layer_path(module: str) -> str | None:
    """ "model.layers.3.mlp" → "model.layers.3"; None outside a list."""
    match = re.match(r"^((?:[^.\d][^.]*\.)*\d+)(?:\.|$)", module)
    return match[1] if match else None


def _segments(block: Block) -> list[_Segment]:
    ops = block.ops
    paths = [layer_path(info(node).module) for node in ops]
    inside = [i for i, path in enumerate(paths) if path is not None]
    if not inside:
        return [_Segment(PROLOGUE), _Segment(EPILOGUE, list(ops))]
    first, last = inside[0], inside[-1]
    between = _between(ops, paths, first, last)
    last += between
    free = _free_of_parameters(block)
    tables = _Segment(TABLES)
    prologue, epilogue = _Segment(PROLOGUE), _Segment(EPILOGUE)
    layers: list[_Segment] = []
    for i, node in enumerate(ops):
        path = paths[i]
        if i < first:
            (tables if node in free else prologue).nodes.append(node)
        elif i > last:
            epilogue.nodes.append(node)
        elif path is not None and (not layers or layers[-1].path != path):
            layers.append(_Segment(path, [node]))
        elif path is None and node in free:
            tables.nodes.append(node)
        else:
            layers[-1].nodes.append(node)
    _return_private_tables(tables, prologue)
    return [tables, prologue, *layers, epilogue]


def _between(ops: Sequence[fx.Node], paths: Sequence[str | None], first: int, last: int) -> int:
    """How many ops after the last layer belong to it: as many as the same ops follow every earlier layer."""
    gap: list[Any] = []
    previous = paths[first]
    for i in range(first, last + 1):
        if paths[i] is None:
            gap.append(ops[i].target)
        elif paths[i] != previous:
            break
    following = [node.target for node in ops[last + 1 : last + 1 + len(gap)]]
    return len(gap) if gap and following == gap else 0


def _free_of_parameters(block: Block) -> set[fx.Node]:
    """Ops that depend on no parameter: every stage can compute them from its inputs."""
    free: set[fx.Node] = set()
    for node in block.nodes:
        if node.op == "placeholder":
            if info(node).role in (Role.BUFFER, Role.INPUT) and not is_count(info(node)):
                free.add(node)
        elif all(n in free for n in node.all_input_nodes):
            free.add(node)
    return free


def _return_private_tables(tables: _Segment, prologue: _Segment) -> None:
    """Tables that only the prologue reads belong to it (positions of a learned embedding, say)."""
    home = set(prologue.nodes)
    for node in reversed(list(tables.nodes)):
        if node.users and all(user in home for user in node.users):
            tables.nodes.remove(node)
            prologue.nodes.insert(0, node)
            home.add(node)


def _extract(segment: _Segment, path: str, name: str, block: Block) -> tuple[Block, tuple[str, ...], tuple[str, ...]]:
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
    graph.output(tuple(mapping[n] for n in results))
    is_loss = any(u.op == "output" for n in results for u in n.users)
    return Block(name, graph), tuple(inputs), () if is_loss else tuple(n.name for n in results)


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
        what = (facts.shape, facts.dtype, facts.role, facts.ref, facts.requires_grad) if facts else ()
        lines.append((str(node.target) if node.op == "call_function" else "", show(node.args), str(what)))
        lines.append(show(tuple(sorted(node.kwargs.items()))))
    return tuple(lines)


def _unique(name: str, taken: dict[str, Block]) -> str:
    if name not in taken:
        return name
    return next(f"{name}{i}" for i in range(2, 1000) if f"{name}{i}" not in taken)


def class_names(model: torch.nn.Module) -> dict[str, str]:
    """Module path → Python class name."""
    return {path: type(module).__name__ for path, module in model.named_modules()}
