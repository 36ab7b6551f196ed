"""What is said of a program beside its costs: in the plan table, in explain() and in warnings."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable

import sympy
from torch import fx

from ..cost_models.layer_costs import OpCost
from ..cost_models.op_costs import op_cost
from ..ir.custom import OPAQUE
from ..ir.graph import B, Program, S, arguments, info, node_inputs, op_name
from ..ir.reads import unread_parameters
from ..placement import REPLICATE, Shard, Strategy
from ..plan.plan import Solution
from ..request import Job
from ..rules import is_known, rule_of
from ..trace.layers import class_names

_SHOWN = 4  # unread parameters
_WAYS = {
    "ring": "ring attention",
    "heads": "heads for the sequence by all-to-alls (Ulysses)",
    "gathered": "keys and values gathered",
    "whole": "all of it on every rank",
}
_NO_MASK, _MASK = "no mask held", "by a mask of all pairs"
_HELD = {"ring": _NO_MASK, "gathered": _NO_MASK, "heads": _MASK, "whole": _MASK}
_WANTED = {"ring": "ring", "ulysses": "heads", "all_gather": "gathered"}


def table_notes(job: Job, program: Program) -> list[str]:
    """The lines under the plan table: modules kept whole, parameters without gradients, checks, defaults."""
    checks = [f"checks: left out at {where}, for all it could do is raise" for where in program.checks]
    defaults = [f"default: {note}" for note in job.notes]
    return [*_opaque_notes(job, program), *_unread_note(program), *checks, *defaults]


def explain_notes(job: Job, program: Program, context: Solution) -> list[str]:
    """The lines under explain(): attentions under cp, modules kept whole and why, what is computed in fp32."""
    over_cp = [note] if (note := context_note(program, context)) else []
    reasons = [f"opaque: {name} is kept whole: {call.reason}" for name, call in program.opaque.items()]
    others = islands_note(program)
    islands = f"in fp32: the loss{f', {others}' if others else ''}; inside kernels: the sums of norms and softmax"
    return [*over_cp, *_opaque_notes(job, program), *reasons, *([islands] if job.compute.half else [])]


def warn_unknown(program: Program, sequence: int) -> None:
    """Warn once of each op without a sharding rule: its name, the user's line, its share of the memory traffic."""
    places: dict[str, str] = {}
    for block, node in program.each_op():
        if program.count(block.name) and not is_known(node):
            places.setdefault(op_name(node), info(node).source or node.name)
    if not places:
        return
    shares = _shares(program, sequence, lambda cost: cost.forward_bytes, op_name)
    for name, place in places.items():
        warnings.warn(
            f"{name} at {place} has no sharding rule: it is replicated on tp ({shares[name]:.1%} of the bytes that a "
            "forward moves)",
            stacklevel=2,
        )


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
    wanted = _WANTED.get(context.name, "")
    others = "; ".join(
        f"{n} with {_WAYS[way]}, as a mask or the heads want it" for way, n in ways.items() if way != wanted
    )
    layout = f"cp={context.ranks}: {ways[wanted]} of {ways.total()} attentions by {_WAYS[wanted]}" if wanted else ""
    return "; ".join(filter(None, (layout, others, *(f"{n} in {window}" for window, n in windows.items()))))


def islands_note(program: Program) -> str:
    """ "router (Block), norm (Block, epilogue)": what a half-precision program computes in fp32 beyond the author's
    own casts, and the blocks where it begins."""
    blocks: defaultdict[str, set[str]] = defaultdict(set)
    for block, node in program.each_op():
        if info(node).island:
            blocks[info(node).island].add(block.name)
    return ", ".join(f"{name} ({', '.join(sorted(where))})" for name, where in blocks.items())


def _way(strategy: Strategy) -> str:
    """The key in `_WAYS` of an attention's strategy on cp."""
    q, k = strategy.inputs[:2]
    if q == Shard(2):
        return "ring" if k == Shard(2) else "gathered"
    return "heads" if q == Shard(1) else "whole"


def opaque_shares(program: Program, sequence: int) -> dict[str, float]:
    """Module that is kept whole → its share of the model's FLOPs, largest first: every rank of tp repeats them."""
    if not program.opaque:
        return {}
    shares = _shares(program, sequence, lambda cost: cost.forward_flops, _opaque_name)
    return {name: shares[name] for name in sorted(program.opaque, key=lambda name: -shares[name])}


def _opaque_name(node: fx.Node) -> str:
    return str(arguments(node)[1]) if node.target is OPAQUE else ""


def _opaque_notes(job: Job, program: Program) -> list[str]:
    classes = class_names(job.model) if program.opaque else {}
    return [
        f"opaque: {name} ({classes.get(program.opaque[name].path, 'an autograd.Function')}) cannot be traced and is "
        f"kept whole on every GPU of tp: {share:.1%} of FLOPs"
        for name, share in opaque_shares(program, job.batch.sequence).items()
    ]


def _unread_note(program: Program) -> list[str]:
    names = unread_parameters(program)
    if not names:
        return []
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return [f"unread: the loss never reaches {len(names)} parameters, which keep their values: {shown}"]


def _shares(
    program: Program, sequence: int, amount: Callable[[OpCost], sympy.Expr], key: Callable[[fx.Node], str]
) -> defaultdict[str, float]:
    """The share that the ops of each key have of the whole forward's `amount`, of one sample of `sequence` tokens."""
    amounts: defaultdict[str, float] = defaultdict(float)
    for block, node in program.each_op():
        whole = Strategy((REPLICATE,) * len(node_inputs(node)), REPLICATE)
        cost = amount(op_cost(node, whole, rule_of(node), 1))
        amounts[key(node)] += program.count(block.name) * float(cost.subs({B: 1, S: sequence}))
    total = sum(amounts.values()) or 1.0
    return defaultdict(float, {name: size / total for name, size in amounts.items()})
