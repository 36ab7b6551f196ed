"""Reductions, and the ops that run along a dim: the dim stays whole, but for sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..ir.graph import info, node_inputs
from ..ir.results import RESULT_OF, RESULTS
from .arguments import dims_of, is_tagged, option
from .factor import Dims, Rule, RuleMaker

aten = torch.ops.aten

_FIRST = (frozenset({0}),)


def reduction(node: fx.Node) -> Rule:
    """Dims `dim` of the operand go, or become 1 with `keepdim`; without `dim` all go."""
    shape = info(node_inputs(node)[0]).shape
    dims, keep = dims_of(option(node, "dim"), len(shape)), bool(option(node, "keepdim", False))
    inputs: Dims = tuple(f"d{i}" for i in range(len(shape)))
    output = [None if i in dims else f for i, f in enumerate(inputs) if keep or i not in dims]
    # A sum of shards is a summand of the sum; a mean, maximum or variance of shards is not.
    whole = frozenset() if node.target in _SUMS else frozenset(f"d{i}" for i in dims)
    linear = _FIRST if node.target in _SUMS | _MEANS else ()
    saves = () if linear else (0,)
    return Rule((inputs,), tuple(output), whole, linear=linear, saves=saves)


def is_reduction(target: Any) -> bool:
    """Whether torch tags an op as a reduction."""
    return is_tagged(target, torch.Tag.reduction)


def along(node: fx.Node) -> Rule:
    """Every dim passes but `dim`, which stays whole."""
    rank = len(info(node).shape)
    dims: Dims = tuple(f"d{i}" for i in range(rank))
    whole = frozenset(dims[d] for d in dims_of(option(node, "dim", -1), rank) if dims[d] is not None)
    linear = _FIRST if node.target is aten.cumsum.default else ()
    return Rule(tuple(dims for _ in node_inputs(node)), dims, frozenset(map(str, whole)), linear=linear, saves=())


def _along_rows(node: fx.Node) -> Rule:
    """tril and triu: the last two dims stay whole."""
    rank = len(info(node).shape)
    dims: Dims = tuple(f"d{i}" for i in range(rank))
    return Rule((dims,), dims, frozenset({f"d{rank - 1}", f"d{rank - 2}"}), linear=_FIRST)


_SUMS = {aten.sum.default, aten.sum.dim_IntList}
_MEANS = {aten.mean.default, aten.mean.dim}

# Results of topk, sort and the like have the rank of their operand; those of max.dim lose a dim.
_RANKED = (aten.topk.default, aten.sort.default, aten.sort.stable, aten.cummax.default, aten.cummin.default)

RULES: dict[object, RuleMaker] = {
    **dict.fromkeys(
        (aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.amax.default), reduction
    ),
    **{op: along if RESULT_OF[op][0] in _RANKED else reduction for ops in RESULTS.values() for op in ops},
    **dict.fromkeys(
        (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default, aten.argsort.default,
         aten.argsort.stable),
        along,
    ),
    aten.tril.default: _along_rows,
    aten.triu.default: _along_rows,
}  # fmt: skip
