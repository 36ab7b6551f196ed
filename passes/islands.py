"""Regions of a half-precision graph that are computed in fp32: how one begins, goes on and ends."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from autopar.ir.build import call
from autopar.ir.graph import Role, info, node_inputs, update_info
from autopar.rules import pointwise, reductions, views
from autopar.rules.arguments import option

aten = torch.ops.aten

HALF = (torch.float16, torch.bfloat16)
_GO_ON = {*views.RULES, *reductions.RULES, *pointwise.RULES}
_GO_ON |= {aten.softmax.int, aten.log_softmax.int, aten.gather.default}

Joins = Callable[[str, fx.Node], bool]


def is_half(node: fx.Node) -> bool:
    return info(node).dtype in HALF


class Islands:
    """Raises values to fp32 in the order of a graph. Each cast to fp32 is marked with its island's name.

    joins(name, value): whether a half-precision value that is met becomes part of an island; where it does not, the
    island's values are cast back for that op. Scalars always join, as they do in torch.
    """

    def __init__(self, joins: Joins) -> None:
        self._joins = joins
        self._island: dict[fx.Node, str] = {}  # value in fp32 → its island
        self._was: dict[fx.Node, torch.dtype] = {}
        self._casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def begin(self, node: fx.Node, name: str, accumulate: bool = False) -> None:
        """`node` is in fp32, and its operands are cast; with `accumulate` only what it sums up is."""
        if not accumulate:
            self._replace(node, lambda n: self._cast(n, torch.float32, node, name) if is_half(n) else n)
        if accumulate or "dtype" in node.kwargs:
            node.kwargs = {**node.kwargs, "dtype": torch.float32}
            update_info(node, island=name)
        elif node.target is aten.to.dtype:
            node.update_arg(1, torch.float32)
            update_info(node, island=name)
        self._raise(node, name)

    def follow(self, node: fx.Node) -> None:
        """An op that may read an island: it goes on with it, or reads values cast back."""
        inside = [n for n in node_inputs(node) if n in self._island]
        if not inside or option(node, "dtype") is not None:  # that of the result is told
            return
        name = self._island[inside[0]]
        others = [n for n in node_inputs(node) if is_half(n)]
        if _goes_on(node) and all(info(n).shape == () or self._joins(name, n) for n in others):
            self._replace(node, lambda n: self._cast(n, torch.float32, node, name) if is_half(n) else n)
            if is_half(node):
                self._raise(node, name)
            return
        self._replace(node, lambda n: self._cast(n, self._was[n], node, "") if n in inside else n)

    def end(self, output: fx.Node) -> None:
        """What leaves a block leaves as other blocks know it."""
        self._replace(output, lambda n: self._cast(n, self._was[n], output, "") if n in self._island else n)

    def _replace(self, node: fx.Node, by: Callable[[fx.Node], fx.Node]) -> None:
        node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), by)

    def _raise(self, node: fx.Node, name: str) -> None:
        self._island[node], self._was[node] = name, info(node).dtype
        update_info(node, dtype=torch.float32)

    def _cast(self, value: fx.Node, dtype: torch.dtype, reader: fx.Node, name: str) -> fx.Node:
        if (value, dtype) not in self._casts:
            with reader.graph.inserting_before(reader):
                cast = call(reader.graph, aten.to.dtype, (value, dtype), info(value))
            update_info(cast, dtype=dtype, island=name)
            self._casts[value, dtype] = cast
        return self._casts[value, dtype]


def _goes_on(node: fx.Node) -> bool:
    """Whether an op takes operands of any dtype, and gives the widest."""
    if info(node).role is Role.CONVERT or node.target in _GO_ON:
        return True
    return pointwise.is_pointwise(node.target) or reductions.is_reduction(node.target)
