"""Add the fp32 islands that the author did not write."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from autopar.ir.graph import Program, info, set_info, update_info
from autopar.placement import Strategy
from autopar.plan import Plan

aten = torch.ops.aten


@dataclass(frozen=True)
class InsertCasts:
    """Compute the loss in fp32: in half precision a vocabulary-wide log-sum-exp loses the answer.

    Requires: typed nodes. Ensures: cross-entropy reads fp32 (or fp64) logits.

        loss = cross_entropy(logits, t)   |   logits_32 = to(logits, float32); loss = cross_entropy(logits_32, t)
    """

    name: ClassVar[str] = "insert_casts"

    def apply(self, program: Program, plan: Plan | None) -> Program:
        program = program.copy_blocks()
        for block, node in program.each_op():
            if node.target is not aten.cross_entropy_loss.default:
                continue
            logits = node.args[0]
            assert isinstance(logits, torch.fx.Node)
            facts = info(logits)
            if facts.dtype.itemsize >= 4:
                continue
            with block.graph.inserting_before(node):
                cast = block.graph.call_function(aten.to.dtype, (logits, torch.float32))
            placement = facts.placement
            set_info(
                cast,
                replace(info(node), shape=facts.shape, strategy=Strategy((placement,), placement), dtype=torch.float32),
            )
            node.update_arg(0, cast)
            for result in (node, *node.users):
                if result.op == "call_function":
                    update_info(result, dtype=torch.float32)
        return program
