"""What to recompute on a stage: the cheapest choices that fit, exactly.

A knapsack of layer classes: a recomputed layer of a class costs time and frees bytes of every micro-batch in flight;
but what is recomputed at once is whole again in backward, so the largest of the choices used sets the workspace. The
layers of a class on a stage take two choices at most, "nothing" among them, and groups of one size: a third could win
less than one layer's recompute, and would be hard to read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, inf
from typing import TypeVar

Chosen = tuple[tuple[str, int], ...]  # (choice, layers) of a class
_TIE = 1 - 1e-12
T = TypeVar("T")


@dataclass(frozen=True)
class Option:
    """One choice for the layers of a class: seconds and bytes freed a layer, of which a group is taken at a time.

    workspace_bytes: the transient peak of the stage as soon as the choice is used.
    """

    what: str
    time_s: float
    frees_bytes: float
    workspace_bytes: float
    group: int = 1


@dataclass(frozen=True)
class ClassOptions:
    """A layer class on a stage: `count` layers and what may be recomputed of them."""

    count: int
    options: tuple[Option, ...]


def cheapest(
    classes: Sequence[ClassOptions], saved_bytes: float, workspace_bytes: float, room_bytes: float
) -> tuple[Chosen, ...] | None:
    """What to recompute of each class so that saved activations and workspace fit; None if they cannot.

    saved_bytes, workspace_bytes: without recompute. Minimises the seconds.
    """
    if saved_bytes + workspace_bytes <= room_bytes:
        return tuple(() for _ in classes)
    best: tuple[float, tuple[Chosen, ...]] | None = None
    for limit in sorted({option.workspace_bytes for own in classes for option in own.options if own.count}):
        need = saved_bytes + max(workspace_bytes, limit) - room_bytes
        within = [(own.count, [o for o in own.options if o.workspace_bytes <= limit]) for own in classes]
        if sum(count * max([0.0, *(o.frees_bytes for o in options)]) for count, options in within) < need * _TIE:
            continue
        found = _cover([(count, tuple(undominated(options))) for count, options in within], need)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return None if best is None else best[1]


def undominated(options: Sequence[Option]) -> Iterator[Option]:
    """Those that free something, but for what another one frees in no more time and in no larger pieces."""
    for option in options:
        better = (o for o in options if o is not option and option.group % o.group == 0)
        if option.frees_bytes > 0 and not any(_dominates(o, option) for o in better):
            yield option


def _dominates(one: Option, other: Option) -> bool:
    ours, theirs = (one.time_s, -one.frees_bytes), (other.time_s, -other.frees_bytes)
    return ours[0] <= theirs[0] and ours[1] <= theirs[1] and (ours != theirs or one.group < other.group)


def _cover(
    classes: Sequence[tuple[int, tuple[Option, ...]]], need_bytes: float
) -> tuple[float, tuple[Chosen, ...]] | None:
    """(seconds, choices) of the cheapest cover of `need_bytes`."""
    there = [place for place, (count, options) in enumerate(classes) if count and options]
    if not there:
        return None
    nothing: list[Chosen] = [() for _ in classes]
    front: list[tuple[float, float, list[Chosen]]] = [(0.0, 0.0, nothing)]
    for place in there[:-1]:
        grown = [
            (time_s + own_s, freed + own_bytes, [*chosen[:place], own, *chosen[place + 1 :]])
            for time_s, freed, chosen in front
            for own_s, own_bytes, own in _front(*classes[place])
        ]
        front = _pareto(grown, need_bytes)
    best: tuple[float, tuple[Chosen, ...]] | None = None
    for time_s, freed, chosen in front:
        last = _least(*classes[there[-1]], need_bytes - freed)
        if last is not None and (best is None or time_s + last[0] < best[0]):
            best = time_s + last[0], (*chosen[: there[-1]], last[1], *chosen[there[-1] + 1 :])
    return best


def _least(count: int, options: tuple[Option, ...], need_bytes: float) -> tuple[float, Chosen] | None:
    """The cheapest mix of two choices that frees enough; of each pair as little as does of the slower one."""
    if need_bytes <= 0:
        return 0.0, ()
    best: tuple[float, Chosen] | None = None
    for base, option in _pairs(options):
        base_bytes = base.frees_bytes if base else 0.0
        if count * option.frees_bytes < need_bytes * _TIE:
            continue  # not even if all layers took it
        gain = option.frees_bytes - base_bytes
        least = ceil((need_bytes - count * base_bytes) / gain * _TIE) if gain else 0
        taken = list(_taken(count, base, option, least))
        if not taken:
            continue
        faster = base is not None and option.time_s < base.time_s  # and in larger groups, else it dominates
        time_s, _, chosen = _point(count, base, option, taken[-1 if faster else 0])
        if best is None or time_s < best[0]:
            best = time_s, chosen
    return best


@cache
def _front(count: int, options: tuple[Option, ...]) -> list[tuple[float, float, Chosen]]:
    """Every mix of two choices that no other beats, by seconds."""
    points = [(0.0, 0.0, Chosen())]
    for base, option in _pairs(options):
        points += [_point(count, base, option, taken) for taken in _taken(count, base, option, 0)]
    return _pareto(points, inf)


def _pairs(options: Sequence[Option]) -> Iterator[tuple[Option | None, Option]]:
    """(what the other layers do, what some do), the second freeing no less; None for nothing."""
    for option in options:
        yield None, option
        rank = option.frees_bytes, option.time_s  # of two that free as much, the slower one has the smaller group
        others = (o for o in options if (o.frees_bytes, o.time_s) < rank and min(o.group, option.group) == 1)
        yield from ((base, option) for base in others)


def _taken(count: int, base: Option | None, option: Option, least: int) -> Iterator[int]:
    """How many layers may take `option`, from `least` on: whole groups, of the others too."""
    first = ceil(max(least, 0) / option.group) * option.group
    rest = base.group if base else 1
    yield from (n for n in range(first, count + 1, option.group) if (count - n) % rest == 0)


def _point(count: int, base: Option | None, option: Option, taken: int) -> tuple[float, float, Chosen]:
    """(seconds, bytes freed, layers of each choice), groups first: they must follow each other."""
    parts = [(option, taken), *([(base, count - taken)] if base else [])]
    used = sorted(((o, n) for o, n in parts if n), key=lambda part: -part[0].group)
    time_s = sum(o.time_s * n for o, n in used)
    return time_s, sum(o.frees_bytes * n for o, n in used), tuple((o.what, n) for o, n in used)


def _pareto(points: list[tuple[float, float, T]], need_bytes: float) -> list[tuple[float, float, T]]:
    """Points that no cheaper one beats in bytes freed, up to the first that frees enough."""
    kept: list[tuple[float, float, T]] = []
    for point in sorted(points, key=lambda p: (p[0], -p[1])):
        if not kept or (kept[-1][1] < need_bytes and point[1] > kept[-1][1]):
            kept.append(point)
    return kept
