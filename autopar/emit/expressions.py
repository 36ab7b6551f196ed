"""aten ops as the Python that a person would write: one line an op.

A writer takes the arguments of an op, by the names of its schema, that are not at their defaults. What it does
not take it cannot lose: an op with an argument left over is written as the call of the aten op itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..errors import PlanError
from ..ir.custom import ACTIVATIONS, EXPERTS, OPAQUE
from ..ir.graph import arguments, info, node_inputs
from .between_ranks import writer_over_ranks
from .losses import LOSSES, REDUCTIONS
from .op import Op
from .opaque import opaque_call
from .public_names import by_full_name, by_name, convolution
from .text import ATOM, COMPARISON, PRODUCT, SUM, UNARY, Render, Text, literal, size_text

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


_Writer = Callable[[Op], Text]


def _infix(symbol: str, precedence: int) -> _Writer:
    # The right operand binds tighter: a - (b + c); comparisons do not chain.
    left = SUM if precedence == COMPARISON else precedence
    return lambda op: Text(f"{op.operand(0, left)} {symbol} {op.operand(1, precedence + 1)}", precedence)


def _prefix(symbol: str) -> _Writer:
    return lambda op: Text(f"{symbol}{op.operand(0, UNARY)}", UNARY)


def _method(name: str) -> _Writer:
    return lambda op: Text(f"{op.operand(0)}.{name}({op.rest()})")


def _function(name: str) -> _Writer:
    return lambda op: Text(f"{name}({op.rest()})")


def _sizes(name: str) -> _Writer:
    def write(op: Op) -> Text:
        source, sizes = op.operand(0), op.take(op.schema[1].name)
        return Text(f"{source}.{name}({', '.join(op.show(n) for n in sizes) or '()'})")

    return write


def _new(fill: str) -> _Writer:
    """new_ones, new_zeros, new_full: the dtype is the node's."""

    def write(op: Op) -> Text:
        op.take("self")
        op.take("dtype")
        return Text(f"torch.{fill}({op.rest()}, dtype={info(op.node).dtype}, device={op.device})")

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
    return Text(f"torch.cat({op.shown('tensors')}, dim={op.take('dim', 0)})")


def _norm(name: str, eps: float | None) -> _Writer:
    def write(op: Op) -> Text:
        given = [op.shown("input"), op.shown("normalized_shape")]
        by_name = "weight" not in op.left
        given += [
            f"{'bias=' if k == 'bias' and by_name else ''}{op.shown(k)}" for k in ("weight", "bias") if k in op.left
        ]
        value = op.take("eps", eps)
        given += [f"eps={value}"] if value is not None else []
        return Text(f"F.{name}({', '.join(given)})")

    return write


def _attention(op: Op) -> Text:
    q, k, v = (op.shown(name) for name in ("query", "key", "value"))
    imports: frozenset[str] = frozenset()
    if op.splits(0, 1) and not op.splits(1, 1):  # fewer K/V heads than ranks
        k, v = (f'head_of({x}, axis="tp")' for x in (k, v))
        imports = frozenset({"heads.head_of"})
    qkv = f"{q}, {k}, {v}"
    random = bool(op.given.get("dropout_p"))
    names = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = "".join(f", {name}={op.shown(name)}" for name in names if name in op.left)
    if random:
        text = f"attention({qkv}{given}, training={op.training}{op.shards})"
        return Text(text, imports=imports | {"random.attention"})
    return Text(f"F.scaled_dot_product_attention({qkv}{given})", imports=imports)


def _dropout(op: Op) -> Text:
    source, p = op.shown("input"), op.shown("p")
    training = op.training if op.take("train") else "False"
    return Text(f"dropout({source}, {p}, {training}{op.shards})", imports=frozenset({"random.dropout"}))


def _embedding(op: Op) -> Text:
    weight, ids = op.shown("weight"), op.shown("indices")
    padding = f", padding_idx={op.shown('padding_idx')}" if "padding_idx" in op.left else ""
    if op.splits(0, 0):
        if op.left:
            raise PlanError(
                f"{', '.join(op.left)} of the embedding {info(op.node).module} ({info(op.node).source}) is not "
                "supported with its rows over tp: leave it out, or use tp=1"
            )
        rows = size_text(info(node_inputs(op.node)[0]).shape[0])
        text = f'embedding({ids}, {weight}, size={rows}, axis="tp"{padding})'
        return Text(text, imports=frozenset({"loss.embedding"}))
    scale = ", scale_grad_by_freq=True" if op.take("scale_grad_by_freq") else ""
    return Text(f"F.embedding({ids}, {weight}{padding}{scale})")


def _cross_entropy(op: Op) -> Text:
    logits, target = op.shown("self"), op.shown("target")
    ignored = f", ignore_index={op.shown('ignore_index')}" if "ignore_index" in op.left else ""
    reduction = REDUCTIONS[op.take("reduction", 1)]
    if op.splits(0, 1):
        assert reduction == "sum" and not op.left, "normalize_loss refuses the others"
        classes = size_text(info(node_inputs(op.node)[0]).shape[1])
        text = f'cross_entropy({logits}, {target}, size={classes}, axis="tp"{ignored})'
        return Text(text, imports=frozenset({"loss.cross_entropy"}))
    shown = f', reduction="{reduction}"' if reduction != "mean" else ""
    more = "".join(f", {name}={op.shown(name)}" for name in ("weight", "label_smoothing") if name in op.left)
    return Text(f"F.cross_entropy({logits}, {target}{more}{ignored}{shown})")


def _experts(op: Op) -> Text:
    activation = ACTIVATIONS[op.take("activation")][0]
    return Text(f"experts({op.rest()}, {activation})", imports=frozenset({"experts.experts"}))


def _batch_norm(op: Op) -> Text:
    """With the statistics of its samples: those of all replicas, by the runtime."""
    op.take("cudnn_enabled")
    if not op.take("training"):
        return by_name(op)
    given = [op.shown(a) for a in ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")]
    return Text(f"batch_norm({', '.join(given)})", imports=frozenset({"norm.batch_norm"}))


def _pad(op: Op) -> Text:
    source, pad, value = op.shown("self"), op.shown("pad"), op.take("value")
    mode = f", mode={op.shown('mode')}" if "mode" in op.left else ""
    whole = isinstance(value, float) and value.is_integer()
    shown = f", value={int(value) if whole else literal(value)}" if value else ""
    return Text(f"F.pad({source}, {pad}{mode}{shown})")


_WRITERS: dict[Any, _Writer] = {
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
    aten.pad.default: _pad,
    aten.batch_norm.default: _batch_norm,
    aten.layer_norm.default: _norm("layer_norm", eps=1e-5),
    aten.rms_norm.default: _norm("rms_norm", eps=None),
    aten.scaled_dot_product_attention.default: _attention,
    aten.dropout.default: _dropout,
    aten.embedding.default: _embedding,
    aten.cross_entropy_loss.default: _cross_entropy,
    **LOSSES,
    EXPERTS: _experts,
    OPAQUE: opaque_call,
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
