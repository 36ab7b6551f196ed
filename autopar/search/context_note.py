"""What the attentions of a model do under a plan that cuts sequences over cp, in words."""

from __future__ import annotations

from collections import Counter

from ..ir.graph import Program, info
from ..placement import Shard, Strategy
from ..plan.plan import Solution
from ..rules import rule_of

_WAYS = {
    "ring": "ring attention",
    "heads": "heads for the sequence by all-to-alls (Ulysses)",
    "gathered": "keys and values gathered",
    "whole": "all of it on every rank",
}
_NO_MASK, _MASK = "no mask held", "by a mask of all pairs"
_HELD = {"ring": _NO_MASK, "gathered": _NO_MASK, "heads": _MASK, "whole": _MASK}
_WANTED = {"ring": "ring", "ulysses": "heads", "all_gather": "gathered"}


def context_note(program: Program, context: Solution) -> str:
    """How the fused attentions meet the whole sequence, and which do otherwise than the layout says; "" without cp."""
    ways: Counter[str] = Counter()
    windows: Counter[str] = Counter()
    for block, node in program.each_op():
        if context.ranks > 1 and rule_of(node).kind == "attention":
            way = _way(context.strategies[block.name][node.name])
            ways[way] += program.count(block.name)
            if (window := info(node).window) is not None:
                windows[f"a sliding window of {window} keys, {_HELD[way]}"] += program.count(block.name)
    if not ways:
        return ""
    own = _WANTED.get(context.name, "")
    others = "; ".join(
        f"{n} with {_WAYS[way]}, as a mask or the heads want it" for way, n in ways.items() if way != own
    )
    said = f"cp={context.ranks}: {ways[own]} of {ways.total()} attentions by {_WAYS[own]}" if own else ""
    return "; ".join(filter(None, (said, others, *(f"{n} in {window}" for window, n in windows.items()))))


def _way(strategy: Strategy) -> str:
    q, k = strategy.inputs[:2]
    if q == Shard(2):
        return "ring" if k == Shard(2) else "gathered"
    return "heads" if q == Shard(1) else "whole"
