"""Ops that draw random numbers: each sample has its own, and the ranks of tp, which draw alike, the same ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..ir.graph import B, Shape, info, node_inputs
from .arguments import is_torch_op
from .factor import Dims, Rule

# torch does not tag these; a permutation of the batch is no draw for each sample.
_UNTAGGED = {"normal_functional", "feature_dropout", "feature_alpha_dropout"}
_OVER_ALL = {"randperm"}


def draws(target: Any) -> bool:
    """Whether an op returns random numbers."""
    if not is_torch_op(target) or len(target._schema.returns) != 1:
        return False
    return torch.Tag.nondeterministic_seeded in target.tags or target.overloadpacket.__name__ in _UNTAGGED


def drawn(node: fx.Node) -> Rule:
    """Whole but for the batch, dim 0 of the result and of each operand that has it; all whole on cp, also rows b·s."""
    apart = node.target.overloadpacket.__name__ not in _OVER_ALL  # type: ignore[union-attr]
    inputs = tuple(_dims(info(n).shape, apart, rows=True) for n in node_inputs(node))
    output = _dims(info(node).shape, apart, rows=bool(inputs))
    whole = (tuple((None,) * len(dims) for dims in inputs), (None,) * len(output))
    return Rule(inputs, output, dims_on={"cp": whole})


def _dims(shape: Shape, apart: bool, rows: bool) -> Dims:
    """rows: the batch may be the outermost of what dim 0 merges."""
    batch = apart and bool(shape) and (shape[0] == B or rows and B in shape[0].free_symbols)
    return tuple("n" if batch and i == 0 else None for i in range(len(shape)))
