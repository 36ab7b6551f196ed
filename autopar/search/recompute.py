"""How many layers of each class to recompute: the cheapest set that fits, exactly.

A bounded knapsack: recomputing one layer of class c costs time_c and frees bytes_c of every micro-batch in
flight; but one recomputed layer at a time is whole again in backward, so the largest class sets the workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ClassOption:
    """A layer class on a stage: `count` layers; each recomputed one costs `time_s` and frees `frees_bytes`.

    workspace_bytes: the transient peak of the stage as soon as one layer of the class is recomputed.
    """

    count: int
    time_s: float
    frees_bytes: float
    workspace_bytes: float


def cheapest(
    options: Sequence[ClassOption], saved_bytes: float, workspace_bytes: float, room_bytes: float
) -> tuple[int, ...] | None:
    """Layers of each class to recompute so that saved activations and workspace fit; None if they cannot.

    saved_bytes, workspace_bytes: without recompute. Minimises Σ count · time_s.
    """
    none = tuple(0 for _ in options)
    if saved_bytes + workspace_bytes <= room_bytes:
        return none
    best: tuple[float, tuple[int, ...]] | None = None
    for limit in sorted({option.workspace_bytes for option in options}):
        need = saved_bytes + max(workspace_bytes, limit) - room_bytes
        usable = [option.workspace_bytes <= limit and option.frees_bytes > 0 for option in options]
        found = _cover(options, usable, need)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return None if best is None else best[1]


def _cover(
    options: Sequence[ClassOption], usable: Sequence[bool], need_bytes: float
) -> tuple[float, tuple[int, ...]] | None:
    """(seconds, counts) of the cheapest cover of `need_bytes`; a Pareto front over the classes one by one."""
    front: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    for option, use in zip(options, usable, strict=True):
        most = option.count if use else 0
        grown = [
            (time_s + k * option.time_s, freed + k * option.frees_bytes, (*counts, k))
            for time_s, freed, counts in front
            for k in range(most + 1)
        ]
        front = _pareto(grown, need_bytes)
    covers = [(time_s, counts) for time_s, freed, counts in front if freed >= need_bytes]
    return min(covers, default=None)


def _pareto(
    points: list[tuple[float, float, tuple[int, ...]]], need_bytes: float
) -> list[tuple[float, float, tuple[int, ...]]]:
    """Points that no cheaper one beats in bytes freed, up to the first that frees enough."""
    kept: list[tuple[float, float, tuple[int, ...]]] = []
    for point in sorted(points, key=lambda p: (p[0], -p[1])):
        if not kept or (kept[-1][1] < need_bytes and point[1] > kept[-1][1]):
            kept.append(point)
    return kept
