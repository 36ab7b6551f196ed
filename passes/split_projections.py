"""Make a projection that is only read in parts one projection a part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from autopar.ir.build import call, eliminate_dead, replace_node
from autopar.ir.graph import MODEL, Program, Role, Shape, arguments, info
from autopar.plan.plan import Plan
from autopar.rules.verify import Level

aten = torch.ops.aten
_RANGE = tuple[int, int]


@dataclass(frozen=True)
class SplitProjections:
    """Readings of a part of a product move to the weight: no shard of [q; k; v] holds a part of each (FAULTS S4).

    Requires: splits written as slices and selects, biases as adds. Ensures: a product with a weight of its own
    whose readers take disjoint ranges of its last dim, by slices or by selects after views, is one product with
    a slice of the weight for each; `split_parameters` makes these slices parameters.

        y = linear(x, w)              |   q = linear(x, slice(w, 0, 0, 64))
        q = slice(y, 2, 0, 64)        |   k = linear(x, slice(w, 0, 64, 128))
        k = slice(y, 2, 64, 128)      |
    """

    name: ClassVar[str] = "split_projections"
    leaves: ClassVar[Level] = Level.TRACED

    def apply(self, program: Program, plan: Plan | None) -> Program:
        program = program.copy_blocks()
        graph = program.blocks[MODEL].graph
        tied = set(program.tied) | set(program.tied.values())
        for node in list(graph.nodes):
            if projection := _projection(node, tied):
                _split(projection)
        eliminate_dead(graph)
        return program


@dataclass(frozen=True)
class _Projection:
    """A product with a weight that nothing else reads, and the bias added to it. `dim`: the weight's output dim."""

    product: fx.Node
    total: fx.Node
    bias: fx.Node | None
    dim: int

    @property
    def shape(self) -> Shape:
        return info(self.total).shape


def _projection(node: fx.Node, tied: set[str]) -> _Projection | None:
    if node.target not in (aten.linear.default, aten.matmul.default):
        return None
    if not _own(node.args[1], tied, rank=2) or len(info(node).shape) < 2:
        return None
    total, bias = node, None
    if len(node.users) == 1 and (reader := next(iter(node.users))).target is aten.add.Tensor and not reader.kwargs:
        (other,) = [a for a in reader.args if a is not node] or [None]
        if isinstance(other, fx.Node) and _own(other, tied, rank=1) and info(other).shape == info(node).shape[-1:]:
            total, bias = reader, other
    return _Projection(node, total, bias, 0 if node.target is aten.linear.default else 1)


def _own(value: Any, tied: set[str], rank: int) -> bool:
    if not isinstance(value, fx.Node) or info(value).role is not Role.PARAMETER:
        return False
    return len(value.users) == 1 and info(value).ref not in tied and len(info(value).shape) == rank


def _split(projection: _Projection) -> None:
    readers = list(projection.total.users)
    width = int(projection.shape[-1])
    if all(_is_slice(r, len(projection.shape) - 1) for r in readers):
        ranges = [_range(r, width) for r in readers]
        if _partition(ranges, width):
            for reader, part in zip(readers, ranges, strict=True):
                replace_node(reader, _part(projection, part, reader))
    elif len(readers) == 1 and (selects := _selects(projection, readers[0])):
        _split_selects(projection, readers[0], selects)


def _is_slice(node: fx.Node, dim: int) -> bool:
    if node.target is not aten.slice.Tensor or len(node.args) > 4:  # a step of its own
        return False
    if not info(node).shape[-1].is_Integer:  # as long as the sequence: no part
        return False
    return int(arguments(node)[1]) % (dim + 1) == dim


def _range(node: fx.Node, width: int) -> _RANGE:
    """Start and end of a slice of the last dim."""
    start = int(arguments(node)[2] or 0)
    start += width if start < 0 else 0
    return start, start + int(info(node).shape[-1])


def _partition(ranges: list[_RANGE], width: int) -> bool:
    """Whether at least two ranges, some perhaps read twice, cover 0 … width without overlap."""
    ordered = sorted(set(ranges))
    ends = [0, *(end for _, end in ordered)]
    return len(ordered) > 1 and ends[-1] == width and all(r[0] == end for r, end in zip(ordered, ends, strict=False))


def _part(projection: _Projection, part: _RANGE, reader: fx.Node) -> fx.Node:
    """The product, with its bias, of a range of the weight's outputs; made before `reader`."""
    product, shape = projection.product, (*projection.shape[:-1], sympy.Integer(part[1] - part[0]))
    graph = product.graph
    with graph.inserting_before(reader):
        weight = _sliced(product.args[1], projection.dim, part)
        result = call(graph, product.target, (product.args[0], weight), info(product), shape)
        if projection.bias is not None:
            bias = _sliced(projection.bias, 0, part)
            result = call(graph, aten.add.Tensor, (result, bias), info(projection.total), shape)
    return result


def _sliced(parameter: Any, dim: int, part: _RANGE) -> fx.Node:
    """A range of a parameter, one slice however often it is read."""
    users: list[fx.Node] = list(parameter.users)
    for reader in users:
        if reader.target is aten.slice.Tensor and reader.args[1:] == (dim, *part):
            return reader
    shape = list(info(parameter).shape)
    shape[dim] = sympy.Integer(part[1] - part[0])
    return call(parameter.graph, aten.slice.Tensor, (parameter, dim, *part), info(parameter), tuple(shape))


# --------------------------------------------------------------------------------
# Parts along a dim of their own: qkv.reshape(b, s, 3, h, e).permute(2, 0, 3, 1, 4).unbind(0)


def _selects(projection: _Projection, view: fx.Node) -> list[fx.Node]:
    """The selects of the outermost of the dims into which `view` splits the features, if only they read it."""
    lead = len(projection.shape) - 1
    if view.target is not aten.reshape.default or info(view).shape[:lead] != projection.shape[:-1]:
        return []
    if len(info(view).shape) < lead + 2:
        return []
    dim, last = lead, view
    while len(last.users) == 1 and (reader := next(iter(last.users))).target in (
        aten.permute.default,
        aten.transpose.int,
    ):
        dim, last = _moved(reader, dim), reader
    selects = list(last.users)
    rank = len(info(last).shape)
    if any(r.target is not aten.select.int or int(arguments(r)[1]) % rank != dim for r in selects):
        return []
    count = int(info(view).shape[lead])
    return selects if {int(arguments(r)[2]) % count for r in selects} == set(range(count)) else []


def _moved(node: fx.Node, dim: int) -> int:
    """Where a dim of the operand is in the result of a permute or transpose."""
    rank = len(info(node).shape)
    if node.target is aten.permute.default:
        return [int(d) % rank for d in arguments(node)[1]].index(dim)
    i, j = (int(d) % rank for d in arguments(node)[1:3])
    return {i: j, j: i}.get(dim, dim)


def _split_selects(projection: _Projection, view: fx.Node, selects: list[fx.Node]) -> None:
    """select(permute(reshape(y))) → permute(reshape(part)), with the selected dim gone from each."""
    lead = len(projection.shape) - 1
    size = int(projection.shape[-1]) // int(info(view).shape[lead])
    for select in selects:
        chain: list[fx.Node] = [arguments(select)[0]]
        while chain[0] is not view:
            chain.insert(0, arguments(chain[0])[0])
        index = int(arguments(select)[2]) % int(info(view).shape[lead])
        value = _part(projection, (index * size, (index + 1) * size), select)
        with view.graph.inserting_before(select):
            value = _without_dim(chain, lead, value)
        replace_node(select, value)


def _without_dim(chain: list[fx.Node], dim: int, value: fx.Node) -> fx.Node:
    """The views of a chain on a value that lacks the dim: the reshape, then permutes."""
    shape = [n for i, n in enumerate(info(chain[0]).shape) if i != dim]
    value = call(value.graph, aten.reshape.default, (value, shape), info(chain[0]), tuple(shape))
    for view in chain[1:]:
        rank, moved = len(info(view).shape), _moved(view, dim)
        order = list(range(rank))
        if view.target is aten.permute.default:
            order = [int(d) % rank for d in arguments(view)[1]]
        else:
            i, j = (int(d) % rank for d in arguments(view)[1:3])
            order[i], order[j] = j, i
        order = [d - (d > dim) for d in order if d != dim]
        dim, shape = moved, [shape[d] for d in order]
        value = _permuted(value, order, view)
    return value


def _permuted(value: fx.Node, order: list[int], like: fx.Node) -> fx.Node:
    """The value with its dims in this order: a transpose where two dims change places."""
    moved = [i for i, d in enumerate(order) if i != d]
    shape = tuple(info(value).shape[d] for d in order)
    if not moved:
        return value
    if len(moved) == 2:
        return call(value.graph, aten.transpose.int, (value, *moved), info(like), shape)
    return call(value.graph, aten.permute.default, (value, order), info(like), shape)
