"""Stage boundaries by dynamic programming on the real costs of layers, ends of the model included.

Two exact passes: the least time of the slowest stage, then, among the splits that reach it, the least memory of
the fullest stage.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import inf

Ranges = tuple[tuple[int, int], ...]
# (stage, start, stop) → (seconds, bytes) of layers [start, stop) as that stage; inf where it does not fit.
StageCost = Callable[[int, int, int], tuple[float, float]]

TIE = 1 + 1e-9


def split(
    layers: int,
    stages: int,
    cost: StageCost,
    work_s: Sequence[float] | None = None,
    limit_s: float = inf,
    grows: bool = False,
) -> Ranges | None:
    """Layers [0, layers) in `stages` ranges of at least one layer; None if no split fits within `limit_s`.

    These only save time: work_s[n], seconds that the first n layers take at least, differences being bounds of
    ranges; grows, a promise that a range that does not fit fits no better with more layers before it.
    """
    if stages == 1:  # also a model without layers, which is all prologue and epilogue
        only_s = cost(0, 0, layers)[0]
        return ((0, layers),) if only_s <= limit_s and only_s < inf else None
    if layers < stages:
        return None
    least_s = work_s or [0.0] * (layers + 1)
    # Any split bounds the best one from above; the even one is near it.
    even = [(stage, layers * stage // stages, layers * (stage + 1) // stages) for stage in range(stages)]
    even_s = max(cost(*at)[0] for at in even) * TIE
    best = _bottleneck(layers, stages, lambda *at: cost(*at)[0], least_s, min(limit_s, even_s), grows)
    if best is None:
        return None
    slowest_s = best[0] * TIE

    def memory_bytes(stage: int, start: int, stop: int) -> float:
        time_s, size_bytes = cost(stage, start, stop)
        return size_bytes if time_s <= slowest_s else inf

    least = _bottleneck(layers, stages, memory_bytes, least_s, slowest_s, grows)
    assert least is not None, "the split of the first pass qualifies"
    return least[1]


def _bottleneck(
    layers: int,
    stages: int,
    cost: Callable[[int, int, int], float],
    least_s: Sequence[float],
    limit_s: float,
    grows: bool,
) -> tuple[float, Ranges] | None:
    """The split whose largest cost is least: best[n] over splits of the first n layers in the stages so far.

    Ranges that take more than `limit_s`, or leave too much for the stages to come, are not asked for.
    """
    best: list[float] = [0.0] + [inf] * layers
    cuts: list[list[int]] = []
    for stage in range(stages):
        after, cut = [inf] * (layers + 1), [-1] * (layers + 1)
        to_come = stages - 1 - stage
        for stop in [layers] if to_come == 0 else range(stage + 1, layers - to_come + 1):
            if to_come and least_s[layers] - least_s[stop] > limit_s * to_come:
                continue
            for start in range(stop - 1, max(stage, bisect_left(least_s, least_s[stop] - limit_s)) - 1, -1):
                if best[start] < after[stop]:
                    own = cost(stage, start, stop)
                    if own == inf and grows:
                        break
                    if max(best[start], own) < after[stop]:
                        after[stop], cut[stop] = max(best[start], own), start
        best, cuts = after, [*cuts, cut]
    return None if best[layers] == inf else (best[layers], _ranges(cuts, layers))


def _ranges(cuts: list[list[int]], layers: int) -> Ranges:
    stop, ranges = layers, []
    for cut in reversed(cuts):
        ranges.append((cut[stop], stop))
        stop = cut[stop]
    return tuple(reversed(ranges))
