"""What recomputing a part of a layer saves, holds and repeats, for every choice that the layer has.

`checkpoint` runs a part again until all that it had kept is there: the ops after the last one that keeps something,
and that one where it keeps operands only, do not run again. So the product at the end of a region is not repeated,
nor a reduction after it. A collective inside the part runs again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import sympy
from torch import fx

from autopar.cost_models.layer_costs import CHUNKS, B, RecomputeCosts, S, Transfer
from autopar.ir.graph import Role, info
from autopar.liveness.regions import find_regions
from autopar.liveness.saved import Saved
from autopar.plan.recompute import LAYER, PARTS, choice


@dataclass(frozen=True)
class PlacedTransfer:
    """A collective of a block: of which value, and before which op (None: of a parameter's gradient)."""

    transfer: Transfer
    value: fx.Node
    reader: fx.Node | None


def recompute_costs(saved: Saved, placed_transfers: Sequence[PlacedTransfer]) -> tuple[RecomputeCosts, ...]:
    """Each combination of the block's regions, and the layer as a whole."""
    there: dict[str, list[tuple[fx.Node, ...]]] = {}
    for region in find_regions(replace(saved, once_per_stage=frozenset())):  # as insert_recompute finds them
        there.setdefault(region.name, []).append(region.ops)
    sides = [["", *(name for name in (part, whole) if name in there)] for whole, part in PARTS.items()]
    found = []
    for names in product(*sides):
        chosen = [name for name in names if name]
        if chosen:
            parts = [ops for name in chosen for ops in there[name]]
            found.append(_costs(choice(", ".join(chosen)), saved, placed_transfers, parts))
    return (*found, _layer_costs(saved, placed_transfers))


def _costs(
    what: str, saved: Saved, placed_transfers: Sequence[PlacedTransfer], parts: Sequence[tuple[fx.Node, ...]]
) -> RecomputeCosts:
    ops: list[int] = []
    transfers: list[int] = []
    for part in parts:
        own_ops, own_transfers = _repeated(saved, placed_transfers, part, inside=set(part))
        ops += own_ops
        transfers += own_transfers
    live = [saved.live_bytes(part) for part in parts]
    return RecomputeCosts(what, saved.total_bytes(parts), largest(live), tuple(ops), tuple(transfers))


def _layer_costs(saved: Saved, placed_transfers: Sequence[PlacedTransfer]) -> RecomputeCosts:
    """The whole layer, of which the hidden states that it reads are kept."""
    block = saved.block
    ops, transfers = _repeated(saved, placed_transfers, block.ops, inside={*block.ops, *block.placeholders()})
    kept = saved.values(n for n in block.placeholders(Role.VALUE) if info(n).requires_grad)
    return RecomputeCosts(LAYER, kept, saved.total_bytes(), tuple(ops), tuple(transfers))


def _repeated(
    saved: Saved, placed_transfers: Sequence[PlacedTransfer], part: Sequence[fx.Node], inside: set[fx.Node]
) -> tuple[list[int], list[int]]:
    """(places of the ops, of the collectives) that run again; a value from outside comes as it was kept."""
    keepers = [i for i, node in enumerate(part) if saved.keeps(node)]
    if not keepers:
        return [], []
    last = keepers[-1]
    run = set(part[: last + saved.keeps_result(part[last])])
    place = {node: i for i, node in enumerate(saved.block.ops)}
    ready = {*run, part[last]}  # the last op's operands are there again, whether it runs or not
    transfers = [
        i
        for i, move in enumerate(placed_transfers)
        if move.transfer.phase == "forward" and move.reader in ready and move.value in inside
        and (move.value is not move.reader or move.value in run)
    ]  # fmt: skip
    return [place[node] for node in run], transfers


def largest(sizes: Sequence[sympy.Expr]) -> sympy.Expr:
    """The largest of some sizes in b and s, judged at b = 1, s = 4096; sympy.Max of many would be slow."""
    at, zero = {B: 1, S: 4096, CHUNKS: 1}, sympy.Integer(0)
    plain, chunked = (
        max([s for s in sizes if (CHUNKS in s.free_symbols) == it], key=lambda s: float(s.subs(at)), default=zero)
        for it in (False, True)
    )
    return sympy.Max(plain, chunked, evaluate=False) if chunked else plain
