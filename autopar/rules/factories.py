"""Ops that make a value from none, or from the shape of one."""

from __future__ import annotations

import torch
from torch import fx

from ..ir.graph import info, node_inputs
from .factor import Dims, Rule, RuleMaker

aten = torch.ops.aten


def _constant(node: fx.Node) -> Rule:
    """Constants are made whole or in any shard; the result's own size is made local."""
    dims = [f"d{i}" for i in range(len(info(node).shape))]
    inputs: tuple[Dims, ...] = tuple((None,) * len(info(o).shape) for o in node_inputs(node))
    return Rule(inputs, tuple(dims), even=frozenset(dims), kind="view")


def _like(node: fx.Node) -> Rule:
    """A constant in the shape of its operand."""
    dims: Dims = tuple(f"d{i}" for i in range(len(info(node).shape)))
    return Rule((dims,), dims, kind="view")


def _counting(node: fx.Node) -> Rule:
    """arange, linspace, eye: the values depend on the position, so the result is whole."""
    dims: Dims = tuple(f"d{i}" for i in range(len(info(node).shape)))
    return Rule((), dims, whole=frozenset(filter(None, dims)), kind="view")


RULES: dict[object, RuleMaker] = {
    **dict.fromkeys(
        (aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format, aten.new_ones.default,
         aten.new_zeros.default, aten.new_full.default, aten.new_empty.default),
        _constant,
    ),
    **dict.fromkeys(
        (aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default), _like
    ),
    **dict.fromkeys(
        (aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default, aten.eye.default,
         aten.eye.m, aten.scalar_tensor.default, aten.tril_indices.default, aten.triu_indices.default),
        _counting,
    ),
}  # fmt: skip
