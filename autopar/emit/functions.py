"""Ops as calls of functions: of the runtime, where ranks or random numbers meet in them, and of torch.nn.functional."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..errors import PlanError
from ..ir.custom import ACTIVATIONS, EXPERTS, LINEAR_CROSS_ENTROPY, OPAQUE
from ..ir.graph import Role, arguments, info, node_inputs, op_name
from ..ir.ops import gathered_attention, is_collective, ring_attention
from ..placement import REPLICATE
from ..rules.arguments import option
from .op import Op, by_name, call
from .text import Render, Text, attribute, literal, quoted, size_text

aten = torch.ops.aten

Writer = Callable[[Op], Text]
_REDUCTIONS = ("none", "mean", "sum")


# --------------------------------------------------------------------------------
# Functions of the runtime that read values of other ranks: they have no schema


def writer_over_ranks(target: Any) -> Callable[[fx.Node, Render], Text] | None:
    """The function that writes a collective, or attention to a sequence that cp cuts; None for other ops."""
    if is_collective(target):
        return _collective
    return _attention_over_cp if target in (ring_attention, gathered_attention) else None


def _collective(node: fx.Node, render: Render) -> Text:
    name = op_name(node)
    keys = {"all_to_all": ("from_dim", "to_dim")}.get(name, ("dim",))
    value, *dims = arguments(node)
    shown = [f"{key}={dim}" for key, dim in zip(keys[: len(dims)], dims, strict=True)]
    return call(name, render(value).source, *shown, _axis(node))


def _axis(node: fx.Node) -> str:
    return f'axis="{node.kwargs["axis"]}"'


def _attention_over_cp(node: fx.Node, render: Render) -> Text:
    q, k, v = (render(n).source for n in node_inputs(node))
    strategy = info(node).strategy
    if strategy is not None and strategy.inputs[0].is_shard and not strategy.inputs[1].is_shard:
        k, v = map(_head_of, (k, v))
    flags = [f"{flag}=True" for flag in ("is_causal", "zigzag") if node.kwargs[flag]]
    flags += [f"window={node.kwargs['window']}"] if option(node, "window") is not None else []
    flags += [f"scale={literal(node.kwargs['scale'])}"] if node.kwargs["scale"] is not None else []
    return call(op_name(node), q, k, v, _axis(node), *flags)


def _head_of(source: str) -> str:
    """The source of the one K/V head that a rank's query heads read, where there are fewer than ranks of tp."""
    return f'head_of({source}, axis="tp")'


# --------------------------------------------------------------------------------
# Functions of the runtime, or of torch where ranks have the whole


def _attention(op: Op) -> Text:
    q, k, v = (op.shown(name) for name in ("query", "key", "value"))
    if op.splits(0, 1) and not op.splits(1, 1):
        k, v = map(_head_of, (k, v))
    random = bool(op.arguments.get("dropout_p"))
    options = op.named("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    if random:
        return call("attention", q, k, v, *options, f"training={op.training}", *op.shards)
    return call("F.scaled_dot_product_attention", q, k, v, *options)


def _dropout(op: Op) -> Text:
    training = op.training if op.take("train") else "False"
    return call("dropout", op.shown("input"), op.shown("p"), training, *op.shards)


def _embedding(op: Op) -> Text:
    weight, ids = op.shown("weight"), op.shown("indices")
    padding = op.named("padding_idx")
    if not op.splits(0, 0):
        return call("F.embedding", ids, weight, *padding, *op.named("scale_grad_by_freq"))
    if op.left:
        raise PlanError(
            f"{', '.join(op.left)} of the embedding {info(op.node).module} ({info(op.node).source}) is not "
            "supported with its rows over tp: leave it out, or use tp=1"
        )
    return call("embedding", ids, weight, *_over_tp(op, 0, 0), *padding)


def _over_tp(op: Op, operand: int, dim: int) -> list[str]:
    """The whole size of a dim of an operand that tp cuts, and the axis."""
    return [f"size={size_text(info(node_inputs(op.node)[operand]).shape[dim])}", 'axis="tp"']


def _cross_entropy(op: Op) -> Text:
    operands, ignored = [op.shown("self"), op.shown("target")], op.named("ignore_index")
    reduction = _REDUCTIONS[op.take("reduction", 1)]
    if op.splits(0, 1):
        assert reduction == "sum" and not op.left, "normalize_loss refuses the others"
        return call("cross_entropy", *operands, *_over_tp(op, 0, 1), *ignored)
    return call("F.cross_entropy", *operands, *op.named("weight", "label_smoothing"), *ignored, *_reduced(reduction))


def _reduced(reduction: str) -> list[str]:
    return [f'reduction="{reduction}"'] if reduction != "mean" else []


def _linear_cross_entropy(op: Op) -> Text:
    """The runtime's function; with the vocabulary over tp also its size and axis."""
    operands = [op.shown(name) for name in ("x", "weight", "target")]
    options = op.named("bias", "chunks", "scale", "softcap", "ignore_index")
    return call("linear_cross_entropy", *operands, *options, *(_over_tp(op, 1, 0) if op.splits(1, 0) else []))


def _batch_norm(op: Op) -> Text:
    """Batch norm in training, by the runtime: its statistics are those of the samples of all replicas."""
    op.take("cudnn_enabled")
    if not op.take("training"):
        return by_name(op)
    names = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
    return call("batch_norm", *(op.shown(name) for name in names))


def _experts(op: Op) -> Text:
    activation = ACTIVATIONS[op.take("activation")][0]
    return call("experts", op.rest(), activation)


def _opaque(op: Op) -> Text:
    """OPAQUE["mlp.router"](self.mlp.router, h): the module, where its parameters are, and its arguments."""
    name, count = op.take("name"), int(op.take("given"))
    tensors: list[fx.Node] = op.take("tensors")
    for used in ("samples", "flops"):
        op.take(used)
    state = tensors[count:]
    for node in state:
        if info(node).role not in (Role.PARAMETER, Role.BUFFER):
            raise PlanError(f"{name} cannot be traced, and several layers share it: give each layer one of its own")
        if info(node).placement != REPLICATE:
            raise PlanError(f"{info(node).ref} of {name}, which is kept whole, is not whole on each GPU: use tp=1")
    module = info(op.node).module if state else ""
    owner = attribute(module, "submodule") if module else "self"
    return call(f"OPAQUE[{quoted(name)}]", owner, *map(op.show, tensors[:count]))


# --------------------------------------------------------------------------------
# Functions of torch.nn.functional


def _norm(name: str, eps: float | None) -> Writer:
    def write(op: Op) -> Text:
        operands = [op.shown("input"), op.shown("normalized_shape")]
        if "weight" in op.left:
            operands += [op.shown(name) for name in ("weight", "bias") if name in op.left]
        operands += op.named("bias")
        value = op.take("eps", eps)
        return call(f"F.{name}", *operands, *([f"eps={value}"] if value is not None else []))

    return write


def _pad(op: Op) -> Text:
    source, pad, value = op.shown("self"), op.shown("pad"), op.take("value")
    whole = isinstance(value, float) and value.is_integer()
    filled = [f"value={int(value) if whole else literal(value)}"] if value else []
    return call("F.pad", source, pad, *op.named("mode"), *filled)


def _loss(name: str, count: int = 2) -> Writer:
    """A loss of `count` operands: options by name, the reduction in words."""

    def write(op: Op) -> Text:
        operands = [op.shown(argument.name) for argument in op.schema[:count]]
        reduction = _REDUCTIONS[op.take("reduction", 1)]
        return call(f"F.{name}", *operands, *op.named(*op.left), *_reduced(reduction))

    return write


FUNCTIONS: dict[Any, Writer] = {
    aten.scaled_dot_product_attention.default: _attention,
    aten.dropout.default: _dropout,
    aten.embedding.default: _embedding,
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.batch_norm.default: _batch_norm,
    aten.layer_norm.default: _norm("layer_norm", eps=1e-5),
    aten.rms_norm.default: _norm("rms_norm", eps=None),
    aten.pad.default: _pad,
    LINEAR_CROSS_ENTROPY: _linear_cross_entropy,
    EXPERTS: _experts,
    OPAQUE: _opaque,
    aten.nll_loss_nd.default: _loss("nll_loss"),
    **{
        getattr(aten, name).default: _loss(name)
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div",
                     "binary_cross_entropy_with_logits", "soft_margin_loss", "hinge_embedding_loss", "poisson_nll_loss")
    },
    **{
        getattr(aten, name).default: _loss(name, 3)
        for name in ("cosine_embedding_loss", "margin_ranking_loss", "triplet_margin_loss")
    },
}  # fmt: skip
