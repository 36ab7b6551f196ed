"""One op on its way to source: the arguments that are still to be written, and the op's public name.

A method of a tensor, or a function of torch, takes what its op takes: both are made from one schema. Functions of
torch.nn.functional are written in Python, with arguments of their own: those that agree are listed.
"""

from __future__ import annotations

from types import BuiltinFunctionType
from typing import Any

import torch
from torch import fx

from ..ir.graph import arguments, info, node_inputs, op_name
from ..ir.results import RESULT_OF
from .text import ATOM, Render, Text, literal, size, tuple_of, tuple_text

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
# Views are reshapes and the fused norms choose their own kernels: neither changes a value.
_WITHOUT_EFFECT = ("memory_format", "cudnn_enable", "cudnn_enabled", "non_blocking")


class Op:
    """One op on its way to source. left: arguments by name that differ from their defaults and are not written."""

    def __init__(self, node: fx.Node, render: Render, device: str, training: str) -> None:
        self.node, self.render, self.device, self.training = node, render, device, training
        target: Any = node.target
        self.schema: list[Any] = target._schema.arguments
        self.arguments: dict[str, Any] = {
            **{a.name: value for a, value in zip(self.schema, arguments(node), strict=False)},
            **node.kwargs,
        }
        for argument in self.schema:
            default = argument.has_default_value() and _same(self.arguments.get(argument.name), argument.default_value)
            if default or argument.name in _WITHOUT_EFFECT:
                self.arguments.pop(argument.name, None)
        self.left = dict(self.arguments)

    def take(self, name: str, default: Any = None) -> Any:
        """An argument, which the source then has."""
        return self.left.pop(name, default)

    def shown(self, name: str) -> str:
        """The source of an argument, by name."""
        return self.show(self.take(name))

    def named(self, *names: str) -> list[str]:
        """The source of these arguments by name, "scale=0.5", leaving out those that are at their defaults."""
        return [f"{name}={self.shown(name)}" for name in names if name in self.left]

    def operand(self, position: int, precedence: int = ATOM) -> str:
        """The source of an argument, by position, as an operand of an operator of that precedence."""
        value = self.take(self.schema[position].name)
        if isinstance(value, fx.Node):
            return self.render(value).at(precedence)
        return literal(value) if isinstance(value, int | float) else size(value).at(precedence)

    def show(self, value: Any) -> str:
        """The source of a value: a node, a literal, or a tuple of them."""
        if isinstance(value, fx.Node):
            return self.render(value).source
        if isinstance(value, list | tuple):
            return tuple_of([self.show(v) for v in value])
        return literal(value)

    def rest(self) -> str:
        """All that is left, as in a call: in order up to the first gap, then by name; a factory gets its device."""
        texts: list[str] = []
        by_name = False
        for argument in self.schema:
            name = argument.name
            by_name |= argument.kwarg_only or name not in self.arguments or (name == "dtype" and bool(texts))
            if name in self.left:
                text = self.shown(name)
                texts.append(f"{name}={text}" if by_name else text)
        if any(a.name == "device" for a in self.schema) and not node_inputs(self.node):
            dtype = info(self.node).dtype
            inferred = dtype == torch.float32 or not dtype.is_floating_point
            texts += [] if "dtype" in self.arguments or inferred else [f"dtype={dtype}"]
            texts.append(f"device={self.device}")
        return ", ".join(texts)

    @property
    def shards(self) -> list[str]:
        """The argument by which `runtime.random` gives each shard of the result its own randomness."""
        facts = info(self.node)
        placements = {axis: facts.placement_on(axis) for axis in ("cp", "tp")}
        axes = [axis for axis, placement in placements.items() if placement is not None and placement.is_shard]
        return [f"shards={tuple_text(axes)}"] if axes else []

    def splits(self, position: int, dim: int) -> bool:
        """Whether an operand is sharded on a dim."""
        strategy = info(self.node).strategy
        placement = strategy.inputs[position] if strategy else None
        return placement is not None and placement.is_shard and placement.dim == dim


def _same(value: Any, default: Any) -> bool:
    return value is None if default is None else not isinstance(value, fx.Node) and bool(value == default)


# --------------------------------------------------------------------------------
# Public names


def call(function: str, *arguments: str) -> Text:
    """A call of a function by its name, with the source of its arguments."""
    return Text(f"{function}({', '.join(arguments)})")


def by_name(op: Op) -> Text:
    """The op as a call of its public name, or of torch.ops where it has none."""
    target: Any = op.node.target
    if target in RESULT_OF:
        original, place, name = RESULT_OF[target]
        several = _call(op, original).source
        fields = {r.name for r in original._schema.returns}
        return Text(f"{several}.{name}" if name in fields else f"{several}[{place}]")
    if target in _MODES:
        return _interpolate(op, _MODES[target])
    if target in _PADS:
        return call("F.pad", op.shown("self"), op.shown("padding"), f'mode="{_PADS[target]}"')
    if target is aten.instance_norm.default:
        return _instance_norm(op)
    if target is aten.index.Tensor:
        return _index(op)
    return _call(op, target)


def by_full_name(op: Op) -> Text:
    """The op as a call of torch.ops: never wrong, never pleasant."""
    return call(_full_name(op.node.target), op.rest())


def _full_name(target: Any) -> str:
    return f"torch.ops.{target.namespace}.{target.overloadpacket.__name__}.{target._overloadname}"


def _call(op: Op, target: Any) -> Text:
    name = target.overloadpacket.__name__
    if target.namespace != "aten" or name.startswith("_"):
        function = _full_name(target)
    elif name in _FUNCTIONAL:
        function = f"F.{name}"
    elif name.startswith("fft_"):
        function = f"torch.fft.{name.removeprefix('fft_')}"
    elif isinstance(op.arguments.get("self"), fx.Node) and op.schema[0].name == "self" and hasattr(torch.Tensor, name):
        function = f"{op.operand(0)}.{name}"
    else:
        function = f"torch.{name}" if _is_of_schema(name) else _full_name(target)
    return call(function, op.rest())


def _is_of_schema(name: str) -> bool:
    """Whether torch has a function of that name that is not written in Python, with arguments of its own (cdist)."""
    return isinstance(getattr(torch, name, None), BuiltinFunctionType) or name == "einsum"


def _instance_norm(op: Op) -> Text:
    defaults = {"use_input_stats": True, "momentum": 0.1, "eps": 1e-5}
    for name in [name for name, default in defaults.items() if op.left.get(name) == default]:
        op.take(name)
    source = op.shown("input")
    return call("F.instance_norm", source, *op.named("running_mean", "running_var", "weight", "bias", *defaults))


def _interpolate(op: Op, mode: str) -> Text:
    shown = [op.shown("input")]
    for name, argument in (("size", "output_size"), ("scale_factor", "scale_factors")):
        value = op.take(argument)
        shown += [] if value is None else [f"{name}={op.show(value)}"]
    return call("F.interpolate", *shown, f'mode="{mode}"', *op.named("align_corners"))


def _index(op: Op) -> Text:
    source, indices = op.operand(0), op.take("indices")
    shown = [":" if i is None else op.show(i) for i in indices]
    return Text(f"{source}[{', '.join(shown)}]")


def convolution(op: Op) -> Text:
    """Strides and paddings that are the same in every dim are written once."""
    shown = [op.shown(name) for name in ("input", "weight", "bias") if name in op.left]
    for argument in op.schema:
        if argument.name in op.left:
            value = op.take(argument.name)
            same = isinstance(value, list | tuple) and len(set(map(int, value))) == 1
            text = literal(int(value[0])) if same else f'"{value}"' if isinstance(value, str) else op.show(value)
            shown.append(f"{argument.name}={text}")
    return call(f"F.{op_name(op.node)}", *shown)
