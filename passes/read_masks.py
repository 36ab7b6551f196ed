"""Read masks of attention that hide nothing or are causal, whatever the length of the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from autopar.ir.build import eliminate_dead
from autopar.ir.graph import MODEL, Program, info, update_info
from autopar.ir.masks import causal_mask, hides_nothing
from autopar.plan.plan import Plan
from autopar.rules.arguments import option
from autopar.rules.verify import Level

aten = torch.ops.aten


@dataclass(frozen=True)
class ReadMasks:
    """A mask that is proven to hide nothing, or to be plain causal, goes; one with a sliding window besides is known
    by its window.

    Requires: a clean program. Ensures: attention with `window` in its facts sees the last `window` keys up to its own
    position, which is all that its mask says; the mask stays, for plans that leave the sequence whole.

        attention(q, k, v, ge(i, 0))                     |   attention(q, k, v, None)
        attention(q, k, v, le(j, i))                     |   attention(q, k, v, None, 0.0, True)
        m = and(le(j, i), gt(j, sub(i, 5)))              |   m = …
        attention(q, k, v, m)                            |   attention(q, k, v, m)  # window=5
    """

    name: ClassVar[str] = "read_masks"
    leaves: ClassVar[Level] = Level.TRACED

    def apply(self, program: Program, plan: Plan | None) -> Program:
        program = program.copy_blocks()
        graph = program.blocks[MODEL].graph
        for node in graph.nodes:
            if node.target is aten.scaled_dot_product_attention.default:
                _read(node)
        eliminate_dead(graph)
        return program


def _read(node: fx.Node) -> None:
    mask, (q, k) = option(node, "attn_mask"), node.args[:2]
    if mask is None or option(node, "is_causal"):
        return
    rows, keys = info(q).shape[-2], info(k).shape[-2]  # type: ignore[arg-type]
    found = causal_mask(mask, rows, keys)
    if found is not None and found.window is not None:
        update_info(node, window=found.window)
    elif found is not None:
        _unmask(node, is_causal=True)
    elif hides_nothing(mask, rows, keys):
        _unmask(node, is_causal=False)


def _unmask(node: fx.Node, is_causal: bool) -> None:
    node.args = (*node.args[:3], None, option(node, "dropout_p"), is_causal)
    node.kwargs = {name: value for name, value in node.kwargs.items() if name in ("scale", "enable_gqa")}
