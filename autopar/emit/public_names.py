"""Ops by their public names, where no line of `expressions` says how a person would write them.

A method of a tensor, or a function of torch, takes what its op takes: both are made from one schema. Functions of
torch.nn.functional are written in Python, with arguments of their own: those that agree are listed.
"""

from __future__ import annotations

from types import BuiltinFunctionType
from typing import Any

import torch
from torch import fx

from ..ir.results import RESULT_OF
from .op import Op
from .text import Text, literal

aten = torch.ops.aten

_FUNCTIONAL = {
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "group_norm", "avg_pool1d", "avg_pool2d",
    "max_pool1d", "max_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "hardswish", "one_hot", "mish", "relu6",
    "leaky_relu", "hardsigmoid", "pixel_shuffle", "linear",
}  # fmt: skip
_MODES = {
    aten.upsample_nearest1d.vec: "nearest", aten.upsample_nearest2d.vec: "nearest",
    aten.upsample_linear1d.vec: "linear", aten.upsample_bilinear2d.vec: "bilinear",
    aten.upsample_bicubic2d.vec: "bicubic",
}  # fmt: skip
_PADS = {aten.replication_pad2d.default: "replicate", aten.reflection_pad2d.default: "reflect",
         aten.reflection_pad1d.default: "reflect"}  # fmt: skip


def by_name(op: Op) -> Text:
    """The op as a call of its public name, or of torch.ops where it has none."""
    target: Any = op.node.target
    if target in RESULT_OF:
        original, place, name = RESULT_OF[target]
        call = _call(op, original)
        fields = {r.name for r in original._schema.returns}
        return Text(f"{call}.{name}" if name in fields else f"{call}[{place}]")
    if target in _MODES:
        return _interpolate(op, _MODES[target])
    if target in _PADS:
        return Text(f'F.pad({op.shown("self")}, {op.shown("padding")}, mode="{_PADS[target]}")')
    if target is aten.instance_norm.default:
        return _instance_norm(op)
    if target is aten.index.Tensor:
        return _index(op)
    return Text(_call(op, target))


def by_full_name(op: Op) -> Text:
    """The op as a call of torch.ops: never wrong, never pleasant."""
    return Text(f"{_full_name(op.node.target)}({op.rest()})")


def _full_name(target: Any) -> str:
    return f"torch.ops.{target.namespace}.{target.overloadpacket.__name__}.{target._overloadname}"


def _call(op: Op, target: Any) -> str:
    name = target.overloadpacket.__name__
    if target.namespace != "aten" or name.startswith("_"):
        return f"{_full_name(target)}({op.rest()})"
    if name in _FUNCTIONAL:
        return f"F.{name}({op.rest()})"
    if name.startswith("fft_"):
        return f"torch.fft.{name.removeprefix('fft_')}({op.rest()})"
    if isinstance(op.given.get("self"), fx.Node) and op.schema[0].name == "self" and hasattr(torch.Tensor, name):
        return f"{op.operand(0)}.{name}({op.rest()})"
    return f"torch.{name}({op.rest()})" if _is_of_schema(name) else f"{_full_name(target)}({op.rest()})"


def _is_of_schema(name: str) -> bool:
    """Whether torch has a function of that name that is not written in Python, with arguments of its own (cdist)."""
    return isinstance(getattr(torch, name, None), BuiltinFunctionType) or name == "einsum"


def _instance_norm(op: Op) -> Text:
    defaults = {"use_input_stats": True, "momentum": 0.1, "eps": 1e-5}
    given = [op.shown("input")]
    for name in ("running_mean", "running_var", "weight", "bias", *defaults):
        value = op.take(name)
        given += [] if value is None or (name in defaults and value == defaults[name]) else [f"{name}={op.show(value)}"]
    return Text(f"F.instance_norm({', '.join(given)})")


def _interpolate(op: Op, mode: str) -> Text:
    given = [op.shown("input")]
    given += [f"size={op.shown('output_size')}"] if op.left.get("output_size") is not None else []
    given += [f"scale_factor={op.shown('scale_factors')}"] if op.left.get("scale_factors") is not None else []
    given.append(f'mode="{mode}"')
    given += [f"align_corners={op.shown('align_corners')}"] if "align_corners" in op.left else []
    for absent in ("output_size", "scale_factors"):
        op.take(absent)
    return Text(f"F.interpolate({', '.join(given)})")


def _index(op: Op) -> Text:
    source, indices = op.operand(0), op.take("indices")
    shown = [":" if i is None else op.show(i) for i in indices]
    return Text(f"{source}[{', '.join(shown)}]")


def convolution(op: Op) -> Text:
    """Strides and paddings that are the same in every dim are written once."""
    given = [op.shown(name) for name in ("input", "weight", "bias") if name in op.left]
    for argument in op.schema:
        if argument.name in op.left:
            value = op.take(argument.name)
            same = isinstance(value, list | tuple) and len(set(map(int, value))) == 1
            text = literal(int(value[0])) if same else f'"{value}"' if isinstance(value, str) else op.show(value)
            given.append(f"{argument.name}={text}")
    name = op.node.target.overloadpacket.__name__  # type: ignore[union-attr]
    return Text(f"F.{name}({', '.join(given)})")
