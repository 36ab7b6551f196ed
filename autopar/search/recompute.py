"""What to recompute on a stage: the cheapest choices that fit, exactly.

A knapsack of layer classes: a recomputed layer of a class costs time and frees bytes of every micro-batch in flight;
but what is recomputed at once is whole again in backward, so the largest of the choices used sets the workspace. The
layers of a class on a stage take two choices at most, "nothing" among them, and groups of one size: a third could win
less than one layer's recompute, and would be hard to read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from itertools import accumulate
from math import ceil, inf

Chosen = tuple[tuple[str, int], ...]  # (choice, layers) of a class
_TIE = 1 - 1e-12


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


_Classes = tuple[tuple[int, tuple[Option, ...]], ...]  # layers of each class, what may be recomputed of them


def cheapest(
    classes: Sequence[ClassOptions],
    saved_bytes: float,
    workspace_bytes: float,
    room_bytes: float,
    limit_s: float = inf,
) -> tuple[Chosen, ...] | None:
    """What to recompute of each class so that saved activations and workspace fit; None if they cannot in `limit_s`.

    saved_bytes, workspace_bytes: without recompute. Minimises the seconds.
    """
    if saved_bytes + workspace_bytes <= room_bytes:
        return tuple(() for _ in classes)
    if (
        _divisible(tuple((own.count, own.options) for own in classes))(saved_bytes + workspace_bytes - room_bytes)
        >= limit_s
    ):
        return None  # whatever the workspace
    within: list[tuple[float, float, _Classes, float]] = []  # by what they take at least
    for limit in {option.workspace_bytes for own in classes for option in own.options if own.count}:
        need = saved_bytes + max(workspace_bytes, limit) - room_bytes
        allowed = tuple((own.count, tuple(o for o in own.options if o.workspace_bytes <= limit)) for own in classes)
        within.append((_divisible(allowed)(need), limit, allowed, need))
    best: tuple[Chosen, ...] | None = None
    for bound_s, _, among, need in sorted(within):
        if bound_s < limit_s and (found := _cover(among, need, limit_s)) is not None:
            limit_s, best = found
    return best


class _Divisible:
    """The seconds of freeing so many bytes if layers, and groups of them, could be divided: none take fewer.

    Steps of each class's convex hull, by their seconds a byte.
    """

    def __init__(self, classes: _Classes) -> None:
        steps = sorted(step for count, options in classes for step in _hull(count, options))
        self.freed = [0.0, *accumulate(freed for _, freed, _ in steps)]
        self.time_s = [0.0, *accumulate(time_s for _, _, time_s in steps)]

    def __call__(self, need_bytes: float) -> float:
        if need_bytes <= 0:
            return 0.0
        at = bisect_left(self.freed, need_bytes * _TIE)
        if at == len(self.freed):
            return inf
        over = (self.freed[at] - need_bytes) / (self.freed[at] - self.freed[at - 1])
        return (self.time_s[at] - max(over, 0.0) * (self.time_s[at] - self.time_s[at - 1])) * _TIE


@cache
def _divisible(classes: _Classes) -> _Divisible:
    return _Divisible(classes)


@cache
def _hull(count: int, options: tuple[Option, ...]) -> list[tuple[float, float, float]]:
    """(seconds a byte, bytes, seconds) of the steps from nothing to what frees most, each the cheapest a byte."""
    steps: list[tuple[float, float, float]] = []
    time_s = freed = 0.0
    while further := [
        ((o.time_s - time_s) / (o.frees_bytes - freed), o.frees_bytes, o.time_s)
        for o in options
        if o.frees_bytes > freed
    ]:
        slope, *corner = min(further)
        steps.append((slope, count * (corner[0] - freed), count * (corner[1] - time_s)))
        freed, time_s = corner
    return steps


@cache
def undominated(options: tuple[Option, ...]) -> tuple[Option, ...]:
    """Those that free something, but for what another one frees in no more time and in no larger pieces."""

    def is_best(option: Option) -> bool:
        better = (o for o in options if o is not option and option.group % o.group == 0)
        return not any(_dominates(o, option) for o in better)

    return tuple(option for option in options if option.frees_bytes > 0 and is_best(option))


def _dominates(one: Option, other: Option) -> bool:
    ours, theirs = (one.time_s, -one.frees_bytes), (other.time_s, -other.frees_bytes)
    return ours[0] <= theirs[0] and ours[1] <= theirs[1] and (ours != theirs or one.group < other.group)


def _cover(classes: _Classes, need_bytes: float, limit_s: float) -> tuple[float, tuple[Chosen, ...]] | None:
    """(seconds, choices) of the cheapest cover of `need_bytes` in less than `limit_s`.

    Class by class, what may come out cheapest first: its seconds so far, and those of the rest if it were divisible.
    """
    there = [place for place, (count, options) in enumerate(classes) if count and options]
    found = _cover_present(tuple(classes[place] for place in there), need_bytes, limit_s)
    if found is None:
        return None
    time_s, chosen = found
    of_place = dict(zip(there, chosen, strict=True))
    return time_s, tuple(of_place.get(place, ()) for place in range(len(classes)))


def _cover_present(classes: _Classes, need_bytes: float, limit_s: float) -> tuple[float, tuple[Chosen, ...]] | None:
    """The same where each class has layers and options."""
    rest = [_divisible(classes[at:]) for at in range(len(classes))]
    own = [(count, undominated(options)) for count, options in classes]
    reached: list[list[tuple[float, float]]] = [[] for _ in range(len(classes) + 1)]  # seconds, bytes freed
    waiting: list[tuple[float, int, float, float, tuple[Chosen, ...]]] = [(0.0, 0, 0.0, 0.0, ())]  # deepest first
    while waiting:
        _, left, time_s, freed, chosen = heappop(waiting)
        at = -left
        if at == len(classes):
            return time_s, chosen
        if any(seconds <= time_s and more >= freed for seconds, more in reached[at]):
            continue
        reached[at].append((time_s, freed))
        last = at + 1 == len(classes)
        for own_s, own_bytes, mix in _least(*own[at], need_bytes - freed) if last else _front(*own[at]):
            total_s = time_s + own_s
            bound_s = total_s if last else total_s + rest[at + 1](need_bytes - freed - own_bytes)
            if bound_s < limit_s:
                heappush(waiting, (bound_s, -at - 1, total_s, freed + own_bytes, (*chosen, mix)))
    return None


def _least(count: int, options: tuple[Option, ...], need_bytes: float) -> list[tuple[float, float, Chosen]]:
    """The cheapest mix of two choices that frees enough, if any; of each pair as little as does of the slower one."""
    if need_bytes <= 0:
        return [(0.0, 0.0, ())]
    best: tuple[float, Option | None, Option, int] | None = None
    for base, option in _pairs(options):
        base_bytes, base_s = (base.frees_bytes, base.time_s) if base else (0.0, 0.0)
        if count * option.frees_bytes < need_bytes * _TIE:
            continue  # not even if all layers took it
        gain = option.frees_bytes - base_bytes
        least = ceil((need_bytes - count * base_bytes) / gain * _TIE) if gain else 0
        if taken := list(_taken(count, base, option, least)):
            faster = base is not None and option.time_s < base_s  # and in larger groups, else it dominates
            own = taken[-1 if faster else 0]
            time_s = own * option.time_s + (count - own) * base_s
            if best is None or time_s < best[0]:
                best = time_s, base, option, own
    return [_point(count, *best[1:])] if best else []


@cache
def _front(count: int, options: tuple[Option, ...]) -> list[tuple[float, float, Chosen]]:
    """Every mix of two choices that no other beats, by seconds."""
    points = [(0.0, 0.0, Chosen())]
    for base, option in _pairs(options):
        points += [_point(count, base, option, taken) for taken in _taken(count, base, option, 0)]
    return _pareto(points)


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


def _pareto(points: list[tuple[float, float, Chosen]]) -> list[tuple[float, float, Chosen]]:
    """Points that no cheaper one beats in bytes freed."""
    kept: list[tuple[float, float, Chosen]] = []
    for point in sorted(points, key=lambda p: (p[0], -p[1])):
        if not kept or point[1] > kept[-1][1]:
            kept.append(point)
    return kept
