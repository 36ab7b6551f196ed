"""Compute the loss in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from autopar.ir.graph import B, Program, info, node_inputs
from autopar.plan.plan import Plan
from autopar.rules.losses import is_raised_loss
from autopar.rules.verify import Level

from .islands import Islands, is_half

aten = torch.ops.aten

_SUMS = (aten.sum.default, aten.sum.dim_IntList)


@dataclass(frozen=True)
class InsertCasts:
    """Compute the loss in fp32: in half precision a vocabulary-wide log-sum-exp loses the answer, and a sum over the
    batch passes fp16's range.

    Requires: typed nodes. Ensures: losses, sums over the batch and what follows them are in fp32 (or fp64).

        loss = cross_entropy(logits, t)   |   logits_32 = to(logits, float32); loss = cross_entropy(logits_32, t)
        total = sum(x)                    |   total = sum(x, dtype=float32)
    """

    name: ClassVar[str] = "insert_casts"
    leaves: ClassVar[Level] = Level.SPREAD

    def apply(self, program: Program, plan: Plan | None) -> Program:
        program = program.copy_blocks()
        for block in program.blocks.values():
            islands = Islands(joins=lambda name, value: True)
            for node in block.ops:
                if is_raised_loss(node) and any(map(is_half, node_inputs(node))):
                    islands.begin(node, "loss")
                elif is_half(node) and _sums_the_batch(node):
                    islands.begin(node, "loss", accumulate=True)
                else:
                    islands.follow(node)
            if any(call.outputs for call in program.calls if call.block == block.name):
                islands.end(block.output)
        return program


def _sums_the_batch(node: fx.Node) -> bool:
    if node.target not in _SUMS or "dtype" in node.kwargs:
        return False
    before, after = (set().union(*(n.free_symbols for n in info(x).shape)) for x in (node_inputs(node)[0], node))
    return B in before - after
