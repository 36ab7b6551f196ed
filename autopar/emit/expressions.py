"""aten ops as the Python that a person would write: one expression an op.

A writer takes the arguments of an op, by the names of its schema, that are not at their defaults. What it does
not take it cannot lose: an op with an argument left over is written as the call of the aten op itself.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..ir.graph import arguments, info, node_inputs, op_name
from .functions import FUNCTIONS, Writer, writer_over_ranks
from .op import Op, by_full_name, by_name, call, convolution
from .text import ATOM, COMPARISON, PRODUCT, SUM, UNARY, Render, Text, literal

aten = torch.ops.aten
_LAST = 9223372036854775807


def expression(node: fx.Node, render: Render, device: str, training: str) -> Text:
    """The source of one op. `render` gives the text of an operand, `device` that of the block's device."""
    if (writer := writer_over_ranks(node.target)) is not None:
        return writer(node, render)
    if node.target is operator.getitem:
        source, place = arguments(node)
        return Text(f"{render(source).at(ATOM)}[{place}]")
    op = Op(node, render, device, training)
    text = _WRITERS.get(node.target, by_name)(op)
    if op.left:
        op = Op(node, render, device, training)
        text = by_full_name(op)
    assert not op.left, f"{node.format_node()}: {op.left} would be lost"
    return text


def _infix(symbol: str, precedence: int) -> Writer:
    # The right operand binds tighter: a - (b + c); comparisons do not chain.
    left = SUM if precedence == COMPARISON else precedence
    return lambda op: Text(f"{op.operand(0, left)} {symbol} {op.operand(1, precedence + 1)}", precedence)


def _prefix(symbol: str) -> Writer:
    return lambda op: Text(f"{symbol}{op.operand(0, UNARY)}", UNARY)


def _attribute(name: str) -> Writer:
    return lambda op: Text(f"{op.operand(0)}.{name}")


def _function(name: str) -> Writer:
    return lambda op: call(name, op.rest())


def _sizes(op: Op) -> Text:
    """A method of sizes or dims, which it takes one by one."""
    source, sizes = op.operand(0), op.take(op.schema[1].name)
    return Text(f"{source}.{op_name(op.node)}({', '.join(map(op.show, sizes)) or '()'})")


def _new(fill: str) -> Writer:
    """A writer of new_ones, new_zeros or new_full, with the dtype that the op's value has."""

    def write(op: Op) -> Text:
        op.take("self")
        op.take("dtype")
        return call(f"torch.{fill}", op.rest(), f"dtype={info(op.node).dtype}", f"device={op.device}")

    return write


def _invert(op: Op) -> Text:
    return _prefix("~")(op) if info(op.node).dtype == torch.bool else by_name(op)


def _slice(op: Op) -> Text:
    source, rank = op.operand(0), len(info(node_inputs(op.node)[0]).shape)
    dim = int(op.take("dim", 0)) % rank
    start, end, step = op.take("start"), op.take("end"), op.take("step", 1)
    first = "" if start in (None, 0) else literal(start)
    last = "" if end is None or end == _LAST else literal(end)
    spread = f"{first}:{last}" + (f":{literal(step)}" if step != 1 else "")
    before = "..., " if dim == rank - 1 and rank > 1 else ":, " * dim
    return Text(f"{source}[{before}{spread}]")


def _select(op: Op) -> Text:
    source, rank = op.operand(0), len(info(node_inputs(op.node)[0]).shape)
    dim = int(op.take("dim")) % rank
    return Text(f"{source}[{':, ' * dim}{op.shown('index')}]")


def _cat(op: Op) -> Text:
    return call("torch.cat", op.shown("tensors"), f"dim={op.take('dim', 0)}")


_WRITERS: dict[Any, Writer] = {
    **FUNCTIONS,
    **dict.fromkeys((aten.matmul.default, aten.bmm.default, aten.mm.default), _infix("@", PRODUCT)),
    aten.add.Tensor: _infix("+", SUM),
    aten.sub.Tensor: _infix("-", SUM),
    aten.mul.Tensor: _infix("*", PRODUCT),
    aten.div.Tensor: _infix("/", PRODUCT),
    **dict.fromkeys(
        (aten.conv1d.default, aten.conv2d.default, aten.conv2d.padding, aten.conv1d.padding, aten.conv3d.default,
         aten.conv_transpose1d.default, aten.conv_transpose2d.input),
        convolution,
    ),
    **dict.fromkeys((aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.__and__.Scalar), _infix("&", COMPARISON)),
    **dict.fromkeys((aten.__or__.Tensor, aten.bitwise_or.Tensor, aten.__or__.Scalar), _infix("|", COMPARISON)),
    **dict.fromkeys((aten.remainder.Scalar, aten.remainder.Tensor), _infix("%", PRODUCT)),
    **dict.fromkeys((aten.floor_divide.default, aten.floor_divide.Scalar), _infix("//", PRODUCT)),
    **{
        getattr(getattr(aten, name), overload): _infix(symbol, COMPARISON)
        for symbol, name in (("==", "eq"), ("!=", "ne"), ("<", "lt"), ("<=", "le"), (">", "gt"), (">=", "ge"))
        for overload in ("Scalar", "Tensor")
    },
    aten.neg.default: _prefix("-"),
    aten.bitwise_not.default: _invert,
    aten.alias.default: lambda op: op.render(op.take("self")),
    **dict.fromkeys((aten.reshape.default, aten.expand.default, aten.permute.default), _sizes),
    **{getattr(aten, name).default: _attribute(shown) for name, shown in
       (("mT", "mT"), ("real", "real"), ("imag", "imag"), ("numpy_T", "T"))},
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.cat.default: _cat,
    aten.log_sigmoid.default: _function("F.logsigmoid"),
    aten.softmax.int: _function("torch.softmax"),
    aten.log_softmax.int: _function("torch.log_softmax"),
    **{getattr(aten, name).default: _function(f"F.{name}") for name in ("linear", "silu", "gelu", "relu", "softplus")},
    aten.new_ones.default: _new("ones"),
    aten.new_zeros.default: _new("zeros"),
    aten.new_full.default: _new("full"),
}  # fmt: skip
