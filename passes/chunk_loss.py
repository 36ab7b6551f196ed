"""Compute head and loss together, the vocabulary in slices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from autopar.errors import PlanError
from autopar.ir.graph import EPILOGUE, Program
from autopar.ir.heads import find_heads, why_no_head, with_chunks
from autopar.plan.plan import Plan
from autopar.rules.verify import Level


@dataclass(frozen=True)
class ChunkLoss:
    """The logits of a head are never whole where the plan says `loss_chunks` > 1.

    Requires: conversions inserted, so that what stands between head and loss is seen. Ensures: each head of the last
    block whose logits only a plain cross-entropy reads is one op with it; PlanError where there is none.

        logits = linear(x, w)             |
        loss = cross_entropy(logits, t)   |   loss = linear_cross_entropy(x, w, t, chunks=8)
    """

    name: ClassVar[str] = "chunk_loss"
    leaves: ClassVar[Level] = Level.SPREAD

    def apply(self, program: Program, plan: Plan | None) -> Program:
        assert plan is not None
        if plan.activations.loss_chunks == 1:
            return program
        block = program.blocks.get(EPILOGUE)
        if block is None or not find_heads(block):
            raise PlanError(f"loss_chunks={plan.activations.loss_chunks}: {why_no_head(block)}; use loss_chunks=1")
        return replace(program, blocks={**program.blocks, EPILOGUE: with_chunks(block, plan.activations.loss_chunks)})
