"""Convolutions, pooling and resampling: channels shard, spatial dims stay whole."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from ..ir.graph import info, node_inputs
from ..placement import PARTIAL, Shard, Strategy
from .arguments import option
from .factor import Dims, Rule, RuleMaker

aten = torch.ops.aten


class Share(int):
    """A rank's share of a count of groups of channels; `whole` is the count itself, by which the rules judge."""

    whole: int

    @classmethod
    def of(cls, count: int, ranks: int) -> Share:
        share = cls(count // ranks)
        share.whole = count
        return share


def whole_count(count: int) -> int:
    """The count over all ranks."""
    return count.whole if isinstance(count, Share) else int(count)


def _conv(node: fx.Node) -> Rule:
    """`x[b i *] w[o i *k] c[o] -> y[b o *]`: output or input channels shard.

    With several groups they shard together, group by group: each rank runs its share of the groups.
    """
    groups = whole_count(option(node, "groups"))
    operands = node_inputs(node)
    spatial = len(info(operands[1]).shape) - 2
    if len(info(node).shape) != spatial + 2:  # one sample without a batch dim
        return Rule(tuple((None,) * len(info(n).shape) for n in operands), (None,) * (spatial + 1))
    transposed = node.target in _TRANSPOSED
    inside, outside = ("c", "c") if groups > 1 else ("i", "o")
    kernel = tuple(f"k{i}" for i in range(spatial))
    channels = (inside, outside) if transposed else (outside, inside)
    if groups > 1:
        # w is [o, i / groups, …]: its first dim holds all groups, its second the channels of one of them.
        channels = ("c", "n")
    where = tuple(f"x{i}" for i in range(spatial))
    inputs: list[Dims] = [("b", inside, *([None] * spatial)), (*channels, *kernel), (outside,)]
    biased = len(operands) > 2
    linear = ({0, 2}, {1, 2}) if biased else ({0}, {1})
    # The bias is added once: where input channels are summed over the ranks it is a summand too.
    rows = Strategy((Shard(1), Shard(0 if transposed else 1), PARTIAL), PARTIAL)
    split = biased and groups == 1
    return Rule(
        tuple(inputs[: 3 if biased else 2]),
        ("b", outside, *where),
        whole=frozenset({*kernel, *where, "n", *(("i",) if split else ())}),
        even=frozenset({"c"}),
        linear=tuple(map(frozenset, linear)),
        special={"tp": (rows,)} if split else {},
        units={"c": sympy.Integer(groups)} if groups > 1 else {},
        kind="matmul",
        saves=(0, 1),
    )


def _group_norm(node: fx.Node) -> Rule:
    """`x[b c *] w[c] v[c] -> y[b c *]`: channels shard by whole groups."""
    x, *weights = node_inputs(node)
    dims: Dims = ("b", "c", *(f"x{i}" for i in range(len(info(x).shape) - 2)))
    return Rule(
        (dims, *(("c",) for _ in weights)),
        dims,
        whole=frozenset(str(d) for d in dims[2:]),
        even=frozenset({"c"}),
        units={"c": sympy.Integer(whole_count(option(node, "num_groups")))},
        saves=(0,),
    )


def _by_channel(node: fx.Node) -> Rule:
    """`x[b c *] -> y[b c *]`, spatial dims whole; averages and interpolations are linear."""
    source, result = (len(info(n).shape) for n in (node_inputs(node)[0], node))
    target: Any = node.target
    spatial = _SPATIAL[target]
    inputs: Dims = (*(f"d{i}" for i in range(source - spatial)), *([None] * spatial))
    output: Dims = (*(f"d{i}" for i in range(result - spatial)), *([None] * spatial))
    linear = node.target not in _MAXIMA
    return Rule((inputs,), output, linear=(frozenset({0}),) if linear else (), saves=() if linear else (0,))


def _spread(node: fx.Node) -> Rule:
    """pixel_shuffle and channel_shuffle mix channels: only the batch passes."""
    shape = info(node).shape
    dims: Dims = ("b", *([None] * (len(shape) - 1)))
    return Rule((dims,), dims, linear=(frozenset({0}),))


_TRANSPOSED = {aten.conv_transpose1d.default, aten.conv_transpose2d.input}
_MAXIMA = {aten.max_pool1d.default, aten.max_pool2d.default}
_SPATIAL = {
    aten.avg_pool1d.default: 1, aten.max_pool1d.default: 1, aten.adaptive_avg_pool1d.default: 1,
    aten.avg_pool2d.default: 2, aten.max_pool2d.default: 2, aten.adaptive_avg_pool2d.default: 2,
    aten.upsample_nearest1d.vec: 1, aten.upsample_nearest2d.vec: 2, aten.upsample_bilinear2d.vec: 2,
    aten.upsample_bicubic2d.vec: 2, aten.upsample_linear1d.vec: 1,
    aten.replication_pad2d.default: 2, aten.reflection_pad2d.default: 2, aten.reflection_pad1d.default: 1,
}  # fmt: skip

RULES: dict[object, RuleMaker] = {
    **dict.fromkeys(
        (aten.conv1d.default, aten.conv1d.padding, aten.conv2d.default, aten.conv2d.padding, aten.conv3d.default,
         *_TRANSPOSED),
        _conv,
    ),
    aten.group_norm.default: _group_norm,
    **dict.fromkeys(_SPATIAL, _by_channel),
    aten.pixel_shuffle.default: _spread,
    aten.channel_shuffle.default: _spread,
}  # fmt: skip
