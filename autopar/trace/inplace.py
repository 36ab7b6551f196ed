"""In-place ops of the user's forward, written as what they compute.

The exported training IR keeps `x.add_(y)` as it was called, and dataflow alone does not show that later readers
of `x`, of its views and of what `x` is a view of see the sum. `Memory` follows that: which tensors share memory is
told by the storages of the trace. A write through a view becomes a write of its base; later readers of other views
take these again from the new base.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from ..errors import TraceError
from ..ir.build import call
from ..ir.graph import NodeInfo, Role, info, op_name
from .source import excerpt, place

aten = torch.ops.aten
_END = (1 << 63) - 1
# Views that keep the order of the elements: undone by a reshape.
_RESHAPES = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints,
    aten.unflatten.int, aten.view_as.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims,
}  # fmt: skip
_SELF_INVERSE = {aten.transpose.int, aten.t.default, aten.mT.default, aten.numpy_T.default}
_PLAIN = {  # where it has another name
    aten.normal_.default: aten.normal_functional.default,
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.bernoulli_.Tensor: aten.bernoulli.Tensor,
}
_FILLS = {aten.zero_.default, aten.fill_.Scalar}


def mutates(node: fx.Node) -> bool:
    """Whether the op changes an operand."""
    schema = getattr(node.target, "_schema", None)  # every OpOverload has one; torch offers no public name
    return bool(schema is not None and schema.is_mutable)


class Memory:
    """What each tensor of the exported graph is now, as a node of ours.

    replay: builds an exported op anew from the present values of its operands.
    """

    def __init__(self, graph: fx.Graph, replay: Callable[[fx.Node], fx.Node]) -> None:
        self._graph, self._replay = graph, replay
        self._now: dict[fx.Node, Any] = {}
        self._base: dict[fx.Node, fx.Node] = {}  # a view → the tensor that it was taken from
        self._first: dict[int, fx.Node] = {}  # storage → its first tensor
        self._owner: dict[fx.Node, fx.Node] = {}  # tensor → the first tensor of its storage
        self._writes: dict[fx.Node, int] = {}  # by first tensor
        self._seen: dict[fx.Node, int] = {}  # writes that a node's present value includes
        self._unknown: set[fx.Node] = set()  # first tensors of storages with a tensor that is no known view

    def define(self, node: fx.Node, value: Any) -> None:
        """The exported `node` is `value`, just built."""
        self._now[node] = value
        storage = _storage(node)
        results = isinstance(node.meta.get("val"), list | tuple)
        if storage is None or (results and storage not in self._first):
            return  # new results, which are taken out of the list each for itself
        owner = self._owner[node] = self._first.setdefault(storage, node)
        self._seen[node] = self._writes.setdefault(owner, 0)
        if owner is not node:
            base = next((n for n in node.all_input_nodes if _storage(n) == storage), None)
            if base is None:
                self._unknown.add(owner)
            else:
                self._base[node] = base

    def read(self, node: fx.Node) -> Any:
        """The present value of `node`: a view of what was written to since is taken again."""
        if node in self._owner:
            writes = self._writes[self._owner[node]]
            if self._seen[node] != writes:
                self._now[node] = self.read(self._base[node]) if mutates(node) else self._replay(node)
                self._seen[node] = writes
        return self._now[node]

    def write(self, node: fx.Node, value: fx.Node) -> None:
        """The in-place op `node` has made its operand `value`."""
        at = node.args[0]
        assert isinstance(at, fx.Node)
        owner = self._owner_of(at, node)
        self.define(node, value)
        changed = {node: value, at: value}
        while at in self._base:
            value, at = self._scatter(at, value, node), self._base[at]
            changed[at] = value
        if at is not owner:
            raise _refusal(node, "memory that other values share in a way that is not understood")
        self._writes[owner] += 1
        for tensor, now in changed.items():
            self._now[tensor], self._seen[tensor] = now, self._writes[owner]

    def check(self, node: fx.Node) -> None:
        """TraceError where an op changes what outlives the forward."""
        schema = node.target._schema  # type: ignore[union-attr]
        given = {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)}
        for argument in schema.arguments:
            operand = (given | node.kwargs).get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(operand, fx.Node):
                self._owner_of(operand, node)

    def _owner_of(self, operand: fx.Node, node: fx.Node) -> fx.Node:
        owner = self._owner[operand]
        if owner in self._unknown:
            raise _refusal(node, "memory that other values share in a way that is not understood")
        if owner.op == "placeholder":
            facts = info(self._now[owner])
            if facts.role is Role.BUFFER:
                raise _buffer_refusal(node, facts.ref)
            kind = "parameter" if facts.role is Role.PARAMETER else "input"
            raise _refusal(node, f"the {kind} {facts.ref}, which outlives the forward")
        return owner

    def _scatter(self, view: fx.Node, value: fx.Node, node: fx.Node) -> fx.Node:
        """What a view was taken from, once the view is `value`."""
        if mutates(view):
            return value
        base = self.read(self._base[view])
        if view.target is aten.detach.default and (info(base).requires_grad or info(value).requires_grad):
            raise _refusal(node, "a detached tensor, behind the back of autograd")
        result = _undo_view(self._graph, view, self._arguments(view), base, value)
        if result is None:
            raise _refusal(node, f"a view that {op_name(view)} made")
        return result

    def _arguments(self, view: fx.Node) -> list[Any]:
        return [self._now.get(a, a) if isinstance(a, fx.Node) else a for a in view.args]


def written(
    graph: fx.Graph,
    node: fx.Node,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype_of: Callable[[torch.dtype], torch.dtype],
) -> fx.Node:
    """What the in-place op `node` computes, as a new value of its operand's shape and dtype.

    dtype_of: a dtype of the trace → the program's.
    """
    operand: fx.Node = args[0]
    like = info(operand)
    name = op_name(node).removesuffix("_")
    if node.target in _FILLS:
        fill = args[1] if len(args) > 1 else 0
        return call(graph, aten.full_like.default, (operand, fill), like)
    if name in ("copy", "fill"):
        return _fitted(graph, args[1], like)
    target: Any = node.target
    plain = _PLAIN.get(target) or getattr(getattr(aten, name, None), target._overloadname, None)
    others = any(a.alias_info is not None and a.alias_info.is_write for a in target._schema.arguments[1:])
    if plain is None or others or torch.Tag.inplace_view in target.tags:
        raise _refusal(node, "a tensor in a way that has no form out of place")
    shadow = plain(*fx.node.map_arg(node.args, _value), **fx.node.map_arg(node.kwargs, _value))
    shape = node.meta["val"].shape
    if tuple(shadow.shape) != tuple(shape):
        raise _refusal(node, "the shape of a tensor")
    new = call(graph, plain, args, replace(like, dtype=dtype_of(shadow.dtype)), **kwargs)
    return _fitted(graph, new, like)


def _fitted(graph: fx.Graph, value: fx.Node, like: NodeInfo) -> fx.Node:
    """`value` in the dtype and shape of `like`."""
    if info(value).dtype != like.dtype:
        value = call(graph, aten.to.dtype, (value, like.dtype), like, info(value).shape)
    if info(value).shape != like.shape:
        value = call(graph, aten.expand.default, (value, list(like.shape)), like)
    return value


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def _storage(node: fx.Node) -> int | None:
    """Which memory an exported tensor, or a list of views of one, lies in."""
    value = node.meta.get("val")
    value = value[0] if isinstance(value, list | tuple) and value else value
    # Private: on meta every data_ptr is 0, and no public name tells two storages apart across views.
    return int(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else None


def _undo_view(graph: fx.Graph, view: fx.Node, args: list[Any], base: fx.Node, value: fx.Node) -> fx.Node | None:
    """`base` with `value` where the view was taken; None for views that cannot be written through."""
    facts = info(base)
    if info(value).dtype != facts.dtype:
        return None
    same = info(value).shape == facts.shape
    if view.target in _RESHAPES:
        return call(graph, aten.reshape.default, (value, list(facts.shape)), facts)
    if view.target in _SELF_INVERSE:
        return call(graph, view.target, (value, *args[1:]), facts)
    if view.target is aten.permute.default:
        order = [d % len(args[1]) for d in args[1]]
        return call(graph, aten.permute.default, (value, [order.index(d) for d in range(len(order))]), facts)
    if view.target is aten.slice.Tensor:
        return _undo_slice(graph, args, base, value)
    if view.target is aten.select.int:
        dim = args[1] % len(facts.shape)
        shape = (*facts.shape[:dim], sympy.Integer(1), *facts.shape[dim + 1 :])
        value = call(graph, aten.unsqueeze.default, (value, dim), info(value), shape)
        return _undo_slice(graph, [base, dim, args[2]], base, value)
    if view.target is aten.narrow.default:
        return _undo_slice(graph, [base, args[1], args[2]], base, value)
    if same and op_name(view) in ("contiguous", "to", "alias", "detach", "expand", "expand_as", "dropout", "float"):
        return value
    return None


def _undo_slice(graph: fx.Graph, args: list[Any], base: fx.Node, value: fx.Node) -> fx.Node | None:
    """The parts of `base` before and after the slice, with `value` between."""
    facts = info(base)
    dim = (args[1] if len(args) > 1 else 0) % len(facts.shape)
    start = (args[2] if len(args) > 2 else 0) or 0
    step = args[4] if len(args) > 4 else 1
    size, length = facts.shape[dim], info(value).shape[dim]
    if step != 1:
        more = (dim, start, args[3] if len(args) > 3 else _END, step)
        return call(graph, aten.slice_scatter.default, (base, value, *more), facts)
    start = sympy.sympify(start, strict=True)
    start = start + size if start.is_negative else start
    after = sympy.expand(size - start - length)
    parts = [value]
    if start != 0:
        parts.insert(0, _part(graph, base, dim, 0, start, start))
    if after != 0:
        parts.append(_part(graph, base, dim, start + length, _END, after))
    return call(graph, aten.cat.default, (parts, dim), facts) if len(parts) > 1 else value


def _part(graph: fx.Graph, base: fx.Node, dim: int, start: Any, end: Any, length: sympy.Expr) -> fx.Node:
    facts = info(base)
    shape = (*facts.shape[:dim], length, *facts.shape[dim + 1 :])
    return call(graph, aten.slice.Tensor, (base, dim, _plain(start), _plain(end)), facts, shape)


def _plain(size: Any) -> Any:
    return int(size) if isinstance(size, sympy.Integer) else size


def _buffer_refusal(node: fx.Node, buffer: str) -> TraceError:
    return TraceError(
        f"the in-place op {op_name(node)}{place(node)} changes the buffer {buffer}, which outlives the forward: "
        "micro-batches and recompute would change it several times a step. Change it between steps, outside of "
        f"forward; for spectral_norm use parametrizations.weight_norm or orthogonal, without such state{excerpt(node)}"
    )


def _refusal(node: fx.Node, what: str) -> TraceError:
    name = op_name(node)
    out_of_place = name.removesuffix("_")
    return TraceError(
        f"the in-place op {name}{place(node)} changes {what}: "
        f"write it out of place there (x = x.{out_of_place}(…), torch.where, torch.cat){excerpt(node)}"
    )
