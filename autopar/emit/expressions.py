"""aten ops as the Python that a person would write: one line an op.

Each writer takes the node's arguments as text, with the precedence of the outermost operator so that
parentheses stand only where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..ir.graph import info, node_inputs
from .text import ATOM, PRODUCT, SUM, UNARY, Render, Text, literal, size_text

aten = torch.ops.aten
_LAST = 9223372036854775807


def expression(node: fx.Node, render: Render, device: str, training: str) -> Text:
    """The source of one op. `render` gives the text of an operand, `device` that of the block's device."""
    context = _Context(node, render, device, training)
    writer = _WRITERS.get(node.target, _fallback)
    return writer(context)


@dataclass(frozen=True)
class _Context:
    node: fx.Node
    render: Render
    device: str
    training: str

    def operand(self, position: int, precedence: int = ATOM) -> str:
        argument = self.node.args[position]
        return self.render(argument).at(precedence) if isinstance(argument, fx.Node) else literal(argument)

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        if len(self.node.args) > position:
            return self.node.args[position]
        return self.node.kwargs.get(name, default)

    def show(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.render(value).source
        if isinstance(value, list | tuple):
            inner = ", ".join(self.show(v) for v in value)
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        return literal(value)

    @property
    def shards(self) -> str:
        """What `runtime.random` needs to give each shard of the result its own randomness."""
        return ', shards=("tp",)' if info(self.node).placement.is_shard else ""


_Writer = Callable[[_Context], Text]


def _infix(symbol: str, precedence: int) -> _Writer:
    def write(c: _Context) -> Text:
        if c.node.kwargs:
            return _fallback(c)
        # The right operand binds tighter: a - (b + c).
        return Text(f"{c.operand(0, precedence)} {symbol} {c.operand(1, precedence + 1)}", precedence)

    return write


def _method(name: str) -> _Writer:
    def write(c: _Context) -> Text:
        rest = ", ".join(c.show(a) for a in c.node.args[1:])
        return Text(f"{c.operand(0)}.{name}({rest})")

    return write


def _function(name: str) -> _Writer:
    def write(c: _Context) -> Text:
        given = [c.show(a) for a in c.node.args] + [f"{k}={c.show(v)}" for k, v in c.node.kwargs.items()]
        return Text(f"{name}({', '.join(given)})")

    return write


def _sizes(name: str) -> _Writer:
    def write(c: _Context) -> Text:
        sizes: Any = c.node.args[1]
        return Text(f"{c.operand(0)}.{name}({', '.join(c.show(n) for n in sizes)})")

    return write


def _factory(name: str) -> _Writer:
    def write(c: _Context) -> Text:
        given = [c.show(a) for a in c.node.args]
        dtype = c.node.kwargs.get("dtype")
        kinds = [f"dtype={dtype}"] if dtype is not None else []
        return Text(f"{name}({', '.join([*given, *kinds, f'device={c.device}'])})")

    return write


def _new(fill: str) -> _Writer:
    """new_ones, new_zeros, new_full: the dtype is the node's."""

    def write(c: _Context) -> Text:
        dtype = info(c.node).dtype
        given = ", ".join(c.show(a) for a in c.node.args[1:])
        return Text(f"torch.{fill}({given}, dtype={dtype}, device={c.device})")

    return write


def _neg(c: _Context) -> Text:
    return Text(f"-{c.operand(0, UNARY)}", UNARY)


def _pow(c: _Context) -> Text:
    return Text(f"{c.operand(0)}.pow({c.show(c.node.args[1])})")


def _slice(c: _Context) -> Text:
    rank = len(info(node_inputs(c.node)[0]).shape)
    dim = int(c.argument(1, "dim", 0)) % rank
    start, end = c.argument(2, "start", 0), c.argument(3, "end", _LAST)
    step = c.argument(4, "step", 1)
    first = "" if start in (None, 0) else literal(start)
    last = "" if end is None or end == _LAST else literal(end)
    spread = f"{first}:{last}" + (f":{step}" if step != 1 else "")
    before = "..., " if dim == rank - 1 and rank > 1 else ":, " * dim
    return Text(f"{c.operand(0)}[{before}{spread}]")


def _select(c: _Context) -> Text:
    rank = len(info(node_inputs(c.node)[0]).shape)
    dim = int(c.argument(1, "dim", 0)) % rank
    return Text(f"{c.operand(0)}[{':, ' * dim}{literal(c.argument(2, 'index'))}]")


def _cat(c: _Context) -> Text:
    return Text(f"torch.cat({c.show(c.node.args[0])}, dim={c.argument(1, 'dim', 0)})")


def _norm(name: str) -> _Writer:
    def write(c: _Context) -> Text:
        given = [c.show(a) for a in c.node.args[:2]]
        weight, bias, eps = c.argument(2, "weight"), None, c.argument(3, "eps")
        if name == "layer_norm":
            bias, eps = c.argument(3, "bias"), c.argument(4, "eps", 1e-5)
        given += [f"{k}={c.show(v)}" for k, v in (("weight", weight), ("bias", bias)) if v is not None]
        given += [f"eps={eps}"] if eps is not None else []
        return Text(f"F.{name}({', '.join(given)})")

    return write


def _attention(c: _Context) -> Text:
    options = {
        "attn_mask": c.argument(3, "attn_mask"),
        "dropout_p": c.argument(4, "dropout_p", 0.0),
        "is_causal": c.argument(5, "is_causal", False),
        "scale": c.node.kwargs.get("scale"),
        "enable_gqa": c.node.kwargs.get("enable_gqa", False),
    }
    qkv = ", ".join(c.show(a) for a in c.node.args[:3])
    given = "".join(f", {k}={c.show(v)}" for k, v in options.items() if v is not None and v != 0.0 and v is not False)
    if options["dropout_p"]:
        return Text(
            f"attention({qkv}{given}, training={c.training}{c.shards})", imports=frozenset({"random.attention"})
        )
    return Text(f"F.scaled_dot_product_attention({qkv}{given})")


def _dropout(c: _Context) -> Text:
    text = f"dropout({c.show(c.node.args[0])}, {c.node.args[1]}, {c.training}{c.shards})"
    return Text(text, imports=frozenset({"random.dropout"}))


def _embedding(c: _Context) -> Text:
    weight, ids = (c.show(a) for a in c.node.args[:2])
    padding_idx = c.argument(2, "padding_idx", -1)
    options = f", padding_idx={padding_idx}" if padding_idx != -1 else ""
    options += ", scale_grad_by_freq=True" if c.argument(3, "scale_grad_by_freq", False) else ""
    strategy = info(c.node).strategy
    if strategy is not None and strategy.inputs[0].is_shard and strategy.inputs[0].dim == 0:
        size = size_text(info(node_inputs(c.node)[0]).shape[0])
        text = f'embedding({ids}, {weight}, size={size}, axis="tp"{options})'
        return Text(text, imports=frozenset({"loss.embedding"}))
    return Text(f"F.embedding({ids}, {weight}{options})")


def _cross_entropy(c: _Context) -> Text:
    logits, target = (c.show(a) for a in c.node.args[:2])
    ignore = c.argument(4, "ignore_index", -100)
    ignored = f", ignore_index={ignore}" if ignore != -100 else ""
    strategy = info(c.node).strategy
    if strategy is not None and strategy.inputs[0].is_shard and strategy.inputs[0].dim == 1:
        size = size_text(info(node_inputs(c.node)[0]).shape[1])
        return Text(
            f'cross_entropy({logits}, {target}, size={size}, axis="tp"{ignored})',
            imports=frozenset({"loss.cross_entropy"}),
        )
    return Text(f'F.cross_entropy({logits}, {target}{ignored}, reduction="sum")')


def _pad(c: _Context) -> Text:
    mode, value = c.argument(2, "mode", "constant"), c.argument(3, "value")
    if not isinstance(mode, str):
        mode, value = "constant", mode
    extra = (f', mode="{mode}"' if mode != "constant" else "") + (f", value={value:g}" if value else "")
    return Text(f"F.pad({c.show(c.node.args[0])}, {c.show(c.node.args[1])}{extra})")


def _collective(c: _Context) -> Text:
    name = c.node.target.__name__  # type: ignore[union-attr]
    keys = {"all_to_all": ("from_dim", "to_dim")}.get(name, ("dim",))
    dims = "".join(f", {k}={d}" for k, d in zip(keys, c.node.args[1:], strict=False))
    text = f'{name}({c.show(c.node.args[0])}{dims}, axis="{c.node.kwargs["axis"]}")'
    return Text(text, imports=frozenset({f"collectives.{name}"}))


def _fallback(c: _Context) -> Text:
    target: Any = c.node.target
    if not hasattr(target, "overloadpacket"):
        return _collective(c)
    name = f"torch.ops.aten.{target.overloadpacket.__name__}.{target._overloadname}"
    given = [c.show(a) for a in c.node.args] + [f"{k}={c.show(v)}" for k, v in c.node.kwargs.items()]
    return Text(f"{name}({', '.join(given)})")


_WRITERS: dict[Any, _Writer] = {
    aten.linear.default: _function("F.linear"),
    aten.matmul.default: _infix("@", PRODUCT),
    aten.bmm.default: _infix("@", PRODUCT),
    aten.mm.default: _infix("@", PRODUCT),
    aten.add.Tensor: _infix("+", SUM),
    aten.sub.Tensor: _infix("-", SUM),
    aten.mul.Tensor: _infix("*", PRODUCT),
    aten.div.Tensor: _infix("/", PRODUCT),
    aten.neg.default: _neg,
    aten.alias.default: lambda c: c.render(c.node.args[0]),
    aten.clone.default: _method("clone"),
    aten.pow.Tensor_Scalar: _pow,
    aten.to.dtype: _method("to"),
    aten.reshape.default: _sizes("reshape"),
    aten.expand.default: _sizes("expand"),
    aten.transpose.int: _method("transpose"),
    aten.permute.default: _sizes("permute"),
    aten.unsqueeze.default: _method("unsqueeze"),
    aten.squeeze.dim: _method("squeeze"),
    aten.t.default: _method("t"),
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.cat.default: _cat,
    aten.pad.default: _pad,
    aten.layer_norm.default: _norm("layer_norm"),
    aten.rms_norm.default: _norm("rms_norm"),
    aten.scaled_dot_product_attention.default: _attention,
    aten.dropout.default: _dropout,
    aten.embedding.default: _embedding,
    aten.cross_entropy_loss.default: _cross_entropy,
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
        op: _infix(symbol, 0)
        for symbol, op in (
            ("==", aten.eq.Scalar), ("!=", aten.ne.Scalar), ("<", aten.lt.Scalar), ("<=", aten.le.Scalar),
            (">", aten.gt.Scalar), (">=", aten.ge.Scalar), ("==", aten.eq.Tensor), ("!=", aten.ne.Tensor),
            ("<", aten.lt.Tensor), ("<=", aten.le.Tensor), (">", aten.gt.Tensor), (">=", aten.ge.Tensor),
        )
    },
    aten.where.self: _function("torch.where"),
    aten.arange.default: _factory("torch.arange"),
    aten.arange.start: _factory("torch.arange"),
    aten.zeros.default: _factory("torch.zeros"),
    aten.ones.default: _factory("torch.ones"),
    aten.full.default: _factory("torch.full"),
    aten.new_ones.default: _new("ones"),
    aten.new_zeros.default: _new("zeros"),
    aten.new_full.default: _new("full"),
}  # fmt: skip
