"""aten ops as the Python that a person would write: one expression an op.

A writer takes the arguments of an op, by the names of its schema, that are not at their defaults. What it does
not take it cannot lose: an op with an argument left over is written as the call of the aten op itself.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..ir.graph import arguments, info, node_inputs
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


def _method(name: str) -> Writer:
    return lambda op: Text(f"{op.operand(0)}.{name}({op.rest()})")


def _function(name: str) -> Writer:
    return lambda op: call(name, op.rest())


def _sizes(name: str) -> Writer:
    def write(op: Op) -> Text:
        source, sizes = op.operand(0), op.take(op.schema[1].name)
        return Text(f"{source}.{name}({', '.join(op.show(n) for n in sizes) or '()'})")

    return write


def _new(fill: str) -> Writer:
    """new_ones, new_zeros, new_full: the dtype is the node's."""

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
    aten.linear.default: _function("F.linear"),
    aten.matmul.default: _infix("@", PRODUCT),
    aten.bmm.default: _infix("@", PRODUCT),
    aten.mm.default: _infix("@", PRODUCT),
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
    aten.log_sigmoid.default: _function("F.logsigmoid"),
    aten.neg.default: _prefix("-"),
    aten.alias.default: lambda op: op.render(op.take("self")),
    aten.clone.default: _method("clone"),
    aten.pow.Tensor_Scalar: _method("pow"),
    aten.bitwise_not.default: _invert,
    aten.masked_fill.Scalar: _method("masked_fill"),
    aten.to.dtype: _method("to"),
    aten.reshape.default: _sizes("reshape"),
    aten.expand.default: _sizes("expand"),
    aten.transpose.int: _method("transpose"),
    aten.permute.default: _sizes("permute"),
    aten.unsqueeze.default: _method("unsqueeze"),
    aten.squeeze.dim: _method("squeeze"),
    aten.t.default: _method("t"),
    aten.mT.default: lambda op: Text(f"{op.operand(0)}.mT"),
    aten.real.default: lambda op: Text(f"{op.operand(0)}.real"),
    aten.imag.default: lambda op: Text(f"{op.operand(0)}.imag"),
    aten.numpy_T.default: lambda op: Text(f"{op.operand(0)}.T"),
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.cat.default: _cat,
    **FUNCTIONS,
    aten.silu.default: _function("F.silu"),
    aten.gelu.default: _function("F.gelu"),
    aten.relu.default: _function("F.relu"),
    aten.softplus.default: _function("F.softplus"),
    aten.softmax.int: _function("torch.softmax"),
    aten.log_softmax.int: _function("torch.log_softmax"),
    **{
        getattr(aten, name).default: _method(name)
        for name in ("cos", "sin", "exp", "tanh", "sigmoid", "rsqrt", "sqrt", "log", "abs", "sum", "mean", "detach")
    },
    aten.sum.dim_IntList: _method("sum"),
    aten.mean.dim: _method("mean"),
    **{
        op: _infix(symbol, COMPARISON)
        for symbol, op in (
            ("==", aten.eq.Scalar), ("!=", aten.ne.Scalar), ("<", aten.lt.Scalar), ("<=", aten.le.Scalar),
            (">", aten.gt.Scalar), (">=", aten.ge.Scalar), ("==", aten.eq.Tensor), ("!=", aten.ne.Tensor),
            ("<", aten.lt.Tensor), ("<=", aten.le.Tensor), (">", aten.gt.Tensor), (">=", aten.ge.Tensor),
        )
    },
    aten.where.self: _function("torch.where"),
    aten.arange.default: _function("torch.arange"),
    aten.arange.start: _function("torch.arange"),
    aten.arange.start_step: _function("torch.arange"),
    aten.linspace.default: _function("torch.linspace"),
    aten.eye.default: _function("torch.eye"),
    aten.zeros.default: _function("torch.zeros"),
    aten.ones.default: _function("torch.ones"),
    aten.full.default: _function("torch.full"),
    aten.new_ones.default: _new("ones"),
    aten.new_zeros.default: _new("zeros"),
    aten.new_full.default: _new("full"),
}  # fmt: skip
