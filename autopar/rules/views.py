"""Ops that move elements and compute nothing. A factor passes from outermost dim to outermost dim."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from ..ir.graph import B, Shape, info, node_inputs
from .arguments import dims_of, option
from .factor import Dims, Rule, RuleMaker

aten = torch.ops.aten

_LINEAR = (frozenset({0}),)


def _dims(rank: int) -> list[str | None]:
    return [f"d{i}" for i in range(rank)]


def _view(inputs: list[str | None], output: list[str | None], whole: frozenset[str] = frozenset()) -> Rule:
    return Rule((tuple(inputs),), tuple(output), whole, linear=_LINEAR, kind="view")


def _rank(node: fx.Node) -> int:
    return len(info(node_inputs(node)[0]).shape)


def _int(argument: Any) -> int:
    return int(argument)


def _reshape(node: fx.Node) -> Rule:
    source, target = info(node_inputs(node)[0]).shape, info(node).shape
    inputs: list[str | None] = [None] * len(source)
    output: list[str | None] = [None] * len(target)
    for number, (i, o) in enumerate(_matching_groups(source, target)):
        inputs[i] = output[o] = f"d{number}"
    rows = _sequence_dims(source, target, inputs, output)
    return replace(_view(inputs, output), dims_on={} if rows is None else {"cp": rows})


def _sequence_dims(
    source: Shape, target: Shape, inputs: list[str | None], output: list[str | None]
) -> tuple[tuple[Dims, ...], Dims] | None:
    """[b, s, …] as [b·s, …] or back, where the sequence passes instead of the batch."""
    if _is_rows(target, source):
        return (tuple(inputs),), (None, inputs[0], *output[2:])
    if _is_rows(source, target):
        return ((None, output[0], *inputs[2:]),), tuple(output)
    return None


def _is_rows(apart: Shape, merged: Shape) -> bool:
    return len(apart) > 1 and len(merged) > 0 and apart[0] == B and apart[0] * apart[1] == merged[0]


def _matching_groups(source: tuple[sympy.Expr, ...], target: tuple[sympy.Expr, ...]) -> list[tuple[int, int]]:
    """Outermost (input dim, output dim) of each group of dims with equal products, ones left out."""
    pairs: list[tuple[int, int]] = []
    i = o = 0
    while i < len(source) and o < len(target):
        if source[i] == 1 and target[o] != 1:
            i += 1
            continue
        if target[o] == 1 and source[i] != 1:
            o += 1
            continue
        pairs.append((i, o))
        left, right = source[i], target[o]
        i, o = i + 1, o + 1
        while sympy.expand(left - right) != 0:
            if i < len(source) and _smaller(left, right):
                left, i = left * source[i], i + 1
            elif o < len(target):
                right, o = right * target[o], o + 1
            else:
                return []  # sizes that sympy cannot match: nothing is shardable through it
    return pairs


def _smaller(left: sympy.Expr, right: sympy.Expr) -> bool:
    """Whether left is a proper factor of right, or at least not a multiple of it."""
    quotient = sympy.cancel(right / left)
    return bool(quotient.is_integer) if quotient.is_number else sympy.denom(quotient) == 1


def _transpose(node: fx.Node) -> Rule:
    rank = _rank(node)
    inputs = _dims(rank)
    output = list(inputs)
    i, j = (_int(a) % rank for a in node.args[1:3])
    output[i], output[j] = output[j], output[i]
    return _view(inputs, output)


def _t(node: fx.Node) -> Rule:
    inputs = _dims(_rank(node))
    return _view(inputs, inputs[::-1])


def _swap_last(node: fx.Node) -> Rule:
    inputs = _dims(_rank(node))
    return _view(inputs, [*inputs[:-2], inputs[-1], inputs[-2]])


def _permute(node: fx.Node) -> Rule:
    inputs = _dims(_rank(node))
    order: list[int] = node.args[1]  # type: ignore[assignment]
    return _view(inputs, [inputs[d] for d in order])


def _unsqueeze(node: fx.Node) -> Rule:
    rank = _rank(node)
    inputs = _dims(rank)
    output = list(inputs)
    output.insert(_int(node.args[1]) % (rank + 1), None)
    return _view(inputs, output)


def _squeeze(node: fx.Node) -> Rule:
    rank = _rank(node)
    inputs = _dims(rank)
    gone = _int(node.args[1]) % rank
    if len(info(node).shape) == rank:  # not of size 1: nothing goes
        return _view(inputs, list(inputs))
    inputs[gone] = None
    return _view(inputs, [f for i, f in enumerate(inputs) if i != gone])


def _expand(node: fx.Node) -> Rule:
    """Dims that grow are sharded by growing to the local size; the input is then whole."""
    source, target = info(node_inputs(node)[0]).shape, info(node).shape
    output = _dims(len(target))
    offset = len(target) - len(source)
    inputs = [output[offset + i] if source[i] == target[offset + i] else None for i in range(len(source))]
    grown = frozenset(f for f in output if f is not None and f not in inputs)
    return Rule((tuple(inputs),), tuple(output), even=grown, linear=_LINEAR, kind="view")


def _along(node: fx.Node, dim: int) -> Rule:
    """Every dim passes but `dim`, which stays whole."""
    inputs = _dims(_rank(node))
    return _view(inputs, list(inputs), whole=frozenset({f"d{dim % len(inputs)}"}))


def _slice(node: fx.Node) -> Rule:
    return _along(node, _int(node.args[1]) if len(node.args) > 1 else 0)


def _select(node: fx.Node) -> Rule:
    inputs = _dims(_rank(node))
    dim = _int(node.args[1]) % len(inputs)
    return _view(inputs, [f for i, f in enumerate(inputs) if i != dim], whole=frozenset({f"d{dim}"}))


def _pad(node: fx.Node) -> Rule:
    inputs = _dims(_rank(node))
    padded = len(node.args[1]) // 2  # type: ignore[arg-type]
    whole = frozenset(f"d{len(inputs) - 1 - i}" for i in range(padded))
    place = 2 if node.target is aten.constant_pad_nd.default else 3
    value = node.args[place] if len(node.args) > place else 0
    linear = _LINEAR if not value else ()
    return Rule((tuple(inputs),), tuple(inputs), whole, linear=linear, kind="view")


def _cat(node: fx.Node) -> Rule:
    operands = node_inputs(node)
    dims = _dims(_rank(node))
    dim = _int(node.args[1]) if len(node.args) > 1 else 0
    inputs: tuple[Dims, ...] = tuple(tuple(dims) for _ in operands)
    together = frozenset(range(len(operands)))
    return Rule(inputs, tuple(dims), frozenset({f"d{dim % len(dims)}"}), linear=(together,), kind="memory")


def _stack(node: fx.Node) -> Rule:
    operands = node_inputs(node)
    dims = _dims(_rank(node))
    output = list(dims)
    output.insert(_int(option(node, "dim")) % (len(dims) + 1), None)
    together = frozenset(range(len(operands)))
    return Rule(tuple(tuple(dims) for _ in operands), tuple(output), linear=(together,), kind="memory")


def _repeat_interleave(node: fx.Node) -> Rule:
    """Each element n times in a row: a shard of the operand gives a shard of the result."""
    dim = option(node, "dim")
    if dim is None:
        return Rule(((None,) * _rank(node),), (None,), linear=_LINEAR)
    return Rule((tuple(_dims(_rank(node))),), tuple(_dims(_rank(node))), linear=_LINEAR)


def _reordered(node: fx.Node) -> Rule:
    """flip, roll: dims whose elements move stay whole."""
    rank = _rank(node)
    whole = frozenset(f"d{d}" for d in dims_of(option(node, "dims"), rank))
    return Rule((tuple(_dims(rank)),), tuple(_dims(rank)), whole, linear=_LINEAR)


def _into(node: fx.Node) -> Rule:
    """slice_scatter, select_scatter: a part of a value, along `dim`, written into it."""
    base, part = (info(n).shape for n in node_inputs(node))
    dims, dim = _dims(len(base)), _int(option(node, "dim")) % len(base)
    source = dims if len(part) == len(base) else [f for i, f in enumerate(dims) if i != dim]
    return Rule((tuple(dims), tuple(source)), tuple(dims), frozenset({f"d{dim}"}), linear=(frozenset({0, 1}),))


def _unfold(node: fx.Node) -> Rule:
    """Windows along a dim, which stays whole, in a new last dim."""
    inputs = _dims(_rank(node))
    whole = frozenset({f"d{_int(node.args[1]) % len(inputs)}"})
    return _view(inputs, [*inputs, None], whole)


RULES: dict[object, RuleMaker] = {
    aten.reshape.default: _reshape,
    aten.squeeze.default: _reshape,
    aten.squeeze.dims: _reshape,
    aten.stack.default: _stack,
    aten.repeat_interleave.self_int: _repeat_interleave,
    aten.flip.default: _reordered,
    aten.roll.default: _reordered,
    aten.slice_scatter.default: _into,
    aten.select_scatter.default: _into,
    aten.unfold.default: _unfold,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.numpy_T.default: _t,
    aten.mT.default: _swap_last,
    aten.permute.default: _permute,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.expand.default: _expand,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.pad.default: _pad,
    aten.constant_pad_nd.default: _pad,
    aten.cat.default: _cat,
}
