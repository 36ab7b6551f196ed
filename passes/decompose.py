"""Turn composite ops into the few that the rules know."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from autopar.ir.build import call, eliminate_dead, replace_node
from autopar.ir.graph import MODEL, Program, arguments, info, op_name
from autopar.ir.results import RESULTS
from autopar.plan.plan import Plan
from autopar.rules.arguments import option
from autopar.rules.verify import Level

aten = torch.ops.aten


@dataclass(frozen=True)
class Decompose:
    """Splits become slices, products lose their bias and run on all leading dims, each op has one result.

    Requires: a clean program. Ensures: no op of torch's has several outputs; a bias is an add of its own (the
    emitter folds it back where the types agree); no product's input is flattened to two dims only for it.

        h = reshape(x, [b*s, 64])                  |   y = add(matmul(x, w), b)
        y = reshape(addmm(b, h, w), [b, s, 192])   |   q = slice(y, 2, 0, 64)
        q, k, v = split(y, 64, 2)                  |   …
    """

    name: ClassVar[str] = "decompose"
    leaves: ClassVar[Level] = Level.TRACED

    def apply(self, program: Program, plan: Plan | None) -> Program:
        program = program.copy_blocks()
        graph = program.blocks[MODEL].graph
        for rewrite in (_decompose, _unflatten):
            for node in list(graph.nodes):
                if node.op == "call_function":
                    rewrite(node)
        eliminate_dead(graph)
        return program


def _decompose(node: fx.Node) -> None:
    if node.target in RESULTS:
        _separate_results(node)
    elif node.target in _DECOMPOSITIONS:
        _DECOMPOSITIONS[node.target](node)


# --------------------------------------------------------------------------------
# Ops of several results


def _parts(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """The readers of an op of several results, and the place of the result that each reads."""
    readers = list(node.users)
    assert all(r.target is operator.getitem for r in readers), f"{node.name} is only read by getitem"
    return [(reader, int(arguments(reader)[1])) for reader in readers]


_RANKING = (aten.topk.default, aten.sort.default, aten.sort.stable)  # values are those of the operand at the indices


def _separate_results(node: fx.Node) -> None:
    """getitem(topk(x, 2), 0) → topk.values(x, 2); where the indices are read too, gather(x, -1, topk.indices(x, 2))."""
    indices: fx.Node | None = None
    parts = _parts(node)  # the indices of a ranking, its last result, come first
    for reader, index in sorted(parts, key=lambda part: -part[1]) if node.target in _RANKING else parts:
        with node.graph.inserting_before(node):
            if indices is not None:
                part = call(node.graph, aten.gather.default, (node.args[0], option(node, "dim"), indices), info(reader))
            else:
                options: dict[str, Any] = dict(node.kwargs)
                part = call(node.graph, RESULTS[node.target][index], node.args, info(reader), **options)
        if node.target in _RANKING and index == 1:
            indices = part
        replace_node(reader, part)
    node.graph.erase_node(node)


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


def _slice_parts(node: fx.Node) -> None:
    """getitem(split(x, sizes, dim), i) → slice(x, dim, start, end)."""
    sizes, dim = _split_sizes(node)
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    for reader, index in _parts(node):
        index %= len(sizes)
        with node.graph.inserting_before(reader):
            part = call(
                node.graph, aten.slice.Tensor, (node.args[0], dim, starts[index], starts[index + 1]), info(reader)
            )
        replace_node(reader, part)
    node.graph.erase_node(node)


def _select_parts(node: fx.Node) -> None:
    """getitem(unbind(x, dim), i) → select(x, dim, i)."""
    dim = int(arguments(node)[1]) if len(node.args) > 1 else int(node.kwargs.get("dim", 0))  # type: ignore[arg-type]
    for reader, index in _parts(node):
        with node.graph.inserting_before(reader):
            part = call(node.graph, aten.select.int, (node.args[0], dim, index), info(reader))
        replace_node(reader, part)
    node.graph.erase_node(node)


def _expand_parts(node: fx.Node) -> None:
    """getitem(broadcast_tensors([x, y]), 1) → y, grown where it is not of the common shape."""
    for reader, index in _parts(node):
        part = arguments(node)[0][index]
        if info(part).shape != info(reader).shape:
            with node.graph.inserting_before(reader):
                part = call(node.graph, aten.expand.default, (part, list(info(reader).shape)), info(reader))
        replace_node(reader, part)
    node.graph.erase_node(node)


# --------------------------------------------------------------------------------
# Products and gates


def _separate_bias(node: fx.Node) -> None:
    """linear(x, w, b) → add(linear(x, w), b)."""
    if len(node.args) < 3 or node.args[2] is None:
        return
    source, weight, bias = node.args
    with node.graph.inserting_before(node):
        product = call(node.graph, aten.linear.default, (source, weight), info(node))
        total = call(node.graph, aten.add.Tensor, (product, bias), info(node))
    replace_node(node, total)


def _separate_addend(node: fx.Node) -> None:
    """addmm(b, x, w), baddbmm(b, x, w) → add(matmul(x, w), b), with the factors alpha and beta where they are not 1."""
    addend, left, right = node.args
    with node.graph.inserting_before(node):
        product = call(node.graph, aten.matmul.default, (left, right), info(node))
        terms = _scaled(product, node.kwargs.get("alpha", 1)), _scaled(addend, node.kwargs.get("beta", 1))
        total = call(node.graph, aten.add.Tensor, terms, info(node))
    replace_node(node, total)


def _scaled(value: Any, factor: Any) -> fx.Node:
    return value if factor == 1 else call(value.graph, aten.mul.Tensor, (value, factor), info(value))


def _gate(node: fx.Node) -> None:
    """glu(x, dim) → a · sigmoid(b), with x = [a; b]."""
    source: Any = node.args[0]
    shape = info(source).shape
    dim = int(arguments(node)[1] if len(node.args) > 1 else node.kwargs.get("dim", -1)) % len(shape)  # type: ignore[arg-type]
    half = shape[dim] / 2
    with node.graph.inserting_before(node):
        value = call(node.graph, aten.slice.Tensor, (source, dim, 0, half), info(node))
        gate = call(node.graph, aten.slice.Tensor, (source, dim, half, shape[dim]), info(node))
        opened = call(node.graph, aten.sigmoid.default, (gate,), info(node))
        result = call(node.graph, aten.mul.Tensor, (value, opened), info(node))
    replace_node(node, result)


_PRODUCTS = {aten.linear.default, aten.matmul.default, aten.mm.default}


def _unflatten(node: fx.Node) -> None:
    """reshape(matmul(reshape(x, [b·s, i]), w) + c, [b, s, o]) → matmul(x, w) + c, where s can be sharded."""
    flat: Any = node.args[0] if node.target in _PRODUCTS else None
    if flat is None or flat.target is not aten.reshape.default:
        return
    source: Any = flat.args[0]
    lead, width = info(source).shape[:-1], info(node).shape[-1]
    if len(info(flat).shape) != 2 or info(source).shape[-1] != info(flat).shape[-1] or len(lead) < 2:
        return
    chain = _with_sums(node)
    readers = list(chain[-1].users)
    if any(r.target is not aten.reshape.default or info(r).shape != (*lead, width) for r in readers):
        return
    result = source
    target = aten.matmul.default if node.target is aten.mm.default else node.target
    for link in chain:
        op, shape = (target if link is node else link.target), (*lead, width)
        with node.graph.inserting_before(link):
            result = call(node.graph, op, (result, link.args[1]), info(link), shape)
    for reader in readers:
        replace_node(reader, result)


def _with_sums(node: fx.Node) -> list[fx.Node]:
    """The node and the sums of it with vectors, as long as each is read by the next alone."""
    chain = [node]
    while len(chain[-1].users) == 1 and (reader := next(iter(chain[-1].users))).target is aten.add.Tensor:
        if reader.kwargs or reader.args[0] is not chain[-1] or not _is_vector(reader.args[1]):
            break
        chain.append(reader)
    return chain


def _is_vector(value: Any) -> bool:
    return isinstance(value, fx.Node) and len(info(value).shape) == 1


def _count_choices(node: fx.Node) -> None:
    """histc(topk_indices(x, k), n, 0, n), how often each of n is chosen → sum(one_hot(topk_indices(x, k), n), 0)."""
    chosen, bins, *bounds = arguments(node)
    while chosen.target is aten.to.dtype:
        chosen = chosen.args[0]
    origin = chosen.args[0] if chosen.target is aten.reshape.default else chosen
    if op_name(origin) != "topk_indices" or info(origin.args[0]).shape[-1] != bins or bounds != [0, bins]:
        return
    rows, facts = info(chosen).shape, replace(info(node), dtype=torch.int64)
    dtype = next(info(reader).dtype for reader in node.users)
    with node.graph.inserting_before(node):
        each = call(node.graph, aten.one_hot.default, (chosen, bins), facts, (*rows, sympy.Integer(bins)))
        number = call(node.graph, aten.to.dtype, (each, dtype), replace(info(each), dtype=dtype))
        total = call(node.graph, aten.sum.dim_IntList, (number, [0]), replace(info(node), dtype=dtype))
    replace_node(node, total)


_DECOMPOSITIONS: dict[Any, Callable[[fx.Node], None]] = {
    aten.broadcast_tensors.default: _expand_parts,
    aten.split.Tensor: _slice_parts,
    aten.split.sizes: _slice_parts,
    aten.split_with_sizes.default: _slice_parts,
    aten.chunk.default: _slice_parts,
    aten.unbind.int: _select_parts,
    aten.linear.default: _separate_bias,
    aten.addmm.default: _separate_addend,
    aten.baddbmm.default: _separate_addend,
    aten.glu.default: _gate,
    aten.histc.default: _count_choices,
}
