"""Read masks of attention that are causal, whatever the length of the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from autopar.ir.build import eliminate_dead
from autopar.ir.graph import MODEL, Program, info, update_info
from autopar.ir.masks import causal_mask
from autopar.plan import Plan
from autopar.rules.arguments import option

aten = torch.ops.aten


@dataclass(frozen=True)
class ReadMasks:
    """A mask that is proven to be plain causal goes; one with a sliding window besides is known by its window.

    Requires: a clean program. Ensures: attention with `window` in its facts sees the last `window` keys up to its own
    position, which is all that its mask says; the mask stays, for plans that leave the sequence whole.

        attention(q, k, v, le(j, i))                     |   attention(q, k, v, None, 0.0, True)
        m = and(le(j, i), gt(j, sub(i, 5)))              |   m = …
        attention(q, k, v, m)                            |   attention(q, k, v, m)  # window=5
    """

    name: ClassVar[str] = "read_masks"

    def apply(self, program: Program, plan: Plan | None) -> Program:
        program = program.copy_blocks()
        graph = program.blocks[MODEL].graph
        for node in graph.nodes:
            if node.target is aten.scaled_dot_product_attention.default:
                _read(node)
        eliminate_dead(graph)
        return program


def _read(node: fx.Node) -> None:
    mask, (q, k, v) = option(node, "attn_mask"), node.args[:3]
    if mask is None or option(node, "is_causal"):
        return
    found = causal_mask(mask, info(q).shape[-2], info(k).shape[-2])  # type: ignore[arg-type]
    if found is None:
        return
    if found.window is not None:
        update_info(node, window=found.window)
        return
    node.args = (q, k, v, None, option(node, "dropout_p"), True)
    node.kwargs = {name: value for name, value in node.kwargs.items() if name in ("scale", "enable_gqa")}
