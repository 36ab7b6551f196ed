"""Turn composite ops into the few that the rules know."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from autopar.ir.build import call, eliminate_dead, replace_node
from autopar.ir.graph import MODEL, Fused, Program, Role, TensorInfo, arguments, info, set_info
from autopar.plan import Plan

aten = torch.ops.aten


@dataclass(frozen=True)
class Decompose:
    """Split and chunk become slices; a fused projection becomes one matmul a part; linear loses its bias.

    Requires: a clean program. Ensures: no op has several outputs; `linear` has no bias (the emitter folds
    the add back); a projection that is only read in parts has one parameter a part, recorded in `fused`.

        y = linear(x, w, b); q, k = split(y, 64, -1)   |   q = add(linear(x, _w_0), _b_0)
                                                       |   k = add(linear(x, _w_1), _b_1)
    """

    name: ClassVar[str] = "decompose"

    def apply(self, program: Program, plan: Plan | None) -> Program:
        program = program.copy_blocks()
        graph = program.blocks[MODEL].graph
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in _SPLITS:
                _slice_parts(node)
        for node in list(graph.nodes):
            if node.target is aten.linear.default:
                program = _split_fused(program, node)
        for node in list(graph.nodes):
            if node.target is aten.linear.default and len(node.args) > 2 and node.args[2] is not None:
                _separate_bias(node)
        eliminate_dead(graph)
        return program


def _split_sizes(node: fx.Node) -> tuple[list[Any], int]:
    source, argument = arguments(node)[:2]
    assert isinstance(source, fx.Node)
    raw: Any = arguments(node)[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    shape = info(source).shape
    dim = int(raw) % len(shape)
    total = shape[dim]
    if node.target is aten.split_with_sizes.default or isinstance(argument, list | tuple):
        return list(argument), dim
    count = int(argument) if node.target is aten.chunk.default else None
    size = sympy.ceiling(total / count) if count else argument
    whole, rest = divmod(int(total), int(size))
    return [size] * whole + ([rest] if rest else []), dim


_SPLITS = {aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int}


def _slice_parts(node: fx.Node) -> None:
    """getitem(split(x, sizes, dim), i) → slice(x, dim, start, end)."""
    if node.target is aten.unbind.int:
        _select_parts(node)
        return
    sizes, dim = _split_sizes(node)
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    for reader in list(node.users):
        assert reader.target is operator.getitem, "a split is only read by getitem"
        index = int(arguments(reader)[1]) % len(sizes)
        with node.graph.inserting_before(reader):
            part = call(
                node.graph, aten.slice.Tensor, (node.args[0], dim, starts[index], starts[index + 1]), info(reader)
            )
        replace_node(reader, part)
    node.graph.erase_node(node)


def _select_parts(node: fx.Node) -> None:
    """getitem(unbind(x, dim), i) → select(x, dim, i)."""
    dim = int(arguments(node)[1]) if len(node.args) > 1 else int(node.kwargs.get("dim", 0))  # type: ignore[arg-type]
    for reader in list(node.users):
        index = int(arguments(reader)[1])
        with node.graph.inserting_before(reader):
            part = call(node.graph, aten.select.int, (node.args[0], dim, index), info(reader))
        replace_node(reader, part)
    node.graph.erase_node(node)


def _slices_of(node: fx.Node) -> list[fx.Node] | None:
    """The slices that together read all of node's last dim once each, in order; None if it is read otherwise."""
    last, end = len(info(node).shape) - 1, 0
    readers = list(node.users)
    if len(readers) < 2 or any(r.target is not aten.slice.Tensor or r.args[1] not in (last, -1) for r in readers):
        return None
    ordered = sorted(readers, key=lambda r: int(arguments(r)[2]))
    for reader in ordered:
        if int(arguments(reader)[2]) != end:
            return None
        end += int(info(reader).shape[-1])
    return ordered if end == int(info(node).shape[-1]) else None


def _split_fused(program: Program, node: fx.Node) -> Program:
    """linear read only in parts → one linear a part, each with its own parameters."""
    parts = _slices_of(node)
    operands = [a for a in node.args[1:] if a is not None]
    own = all(isinstance(a, fx.Node) and info(a).role is Role.PARAMETER and len(a.users) == 1 for a in operands)
    tied = set(program.tied) | set(program.tied.values())
    if parts is None or not own or any(info(a).ref in tied for a in operands if isinstance(a, fx.Node)):
        return program
    sizes = [info(part).shape[-1] for part in parts]
    split = []
    for operand in operands:
        assert isinstance(operand, fx.Node)
        program, placeholders = _split_parameter(program, operand, sizes)
        split.append(placeholders)
    for part, own_operands in zip(parts, zip(*split, strict=True), strict=True):
        with node.graph.inserting_before(part):
            new = call(node.graph, aten.linear.default, (node.args[0], *own_operands), info(node), info(part).shape)
        replace_node(part, new)
    eliminate_dead(node.graph)
    return program


def _split_parameter(program: Program, operand: fx.Node, sizes: Sequence[sympy.Expr]) -> tuple[Program, list[fx.Node]]:
    facts = info(operand)
    owner, _, leaf = facts.ref.rpartition(".")
    names = tuple(f"{owner}._{leaf}_{i}" for i in range(len(sizes)))
    placeholders = []
    parameters = {k: v for k, v in program.parameters.items() if k != facts.ref}
    original = program.parameters[facts.ref]
    for name, size in zip(names, sizes, strict=True):
        shape = (size, *facts.shape[1:])
        with operand.graph.inserting_before(operand):
            new = operand.graph.placeholder(name.replace(".", "_"))
        placeholders.append(set_info(new, replace(facts, shape=shape, ref=name)))
        parameters[name] = TensorInfo(shape, original.dtype, original.requires_grad)
    fused = {**program.fused, facts.ref: Fused(names, 0)}
    return replace(program, parameters=parameters, fused=fused), placeholders


def _separate_bias(node: fx.Node) -> None:
    source, weight, bias = node.args
    with node.graph.inserting_before(node):
        product = call(node.graph, aten.linear.default, (source, weight), info(node))
        total = call(node.graph, aten.add.Tensor, (product, bias), info(node))
    replace_node(node, total)
