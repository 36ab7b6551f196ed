"""Boundaries of the virtual stages: the ranks are balanced, all stages of each together.

It starts from the split whose slowest stage takes least (exact, `stages.split`, memory apart), and moves one layer
over one boundary while that is better: fewer ranks that do not fit, then a faster slowest rank, then less memory on
the fullest one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from math import inf
from operator import sub

from autopar.cost_models.compute import stage_shape, stage_time

from .boundaries import Ranges, StageCost, split
from .stages import RankCost, StageCosts

_SAME = 1 - 1e-9
_FAR = 0.98


def split_virtual(costs: StageCosts, step_s: Callable[[Ranges], float], limit_s: float) -> Ranges | None:
    """Ranges of layers for all stages, stage k on rank k % pp; None where none is found that fits within the limit.

    step_s: of the step with these ranges, nothing recomputed. Where it is far over the limit, no move would do.
    """
    context, layers = costs.context, len(costs.price.layers)
    stages = context.mesh.pp * context.virtual_stages
    known, key = costs.price.balanced, (stages, context.splits_backward)
    if key not in known:  # the same whatever is sharded, and however many micro-batches there are
        known[key] = split(layers, stages, _times(costs), costs.work_s)
    if (ranges := known[key]) is None:
        return None
    pp = context.mesh.pp
    # A move helps one rank or two; where nothing is known to be better, more are tried.
    hopeless, unfit = (2 if limit_s < inf else pp), 0
    for rank in range(pp):
        unfit += costs.rank_cost(rank, ranges[rank::pp]).time_s == inf
        if unfit >= hopeless:
            return None
    if step_s(ranges) * _FAR > limit_s:
        return None
    ranks = _costs(costs, ranges, pp)
    better = True
    while better:
        better = False
        for moved in _moved_layers(ranges, _worst(ranks)):
            others = _costs(costs, moved, pp)
            if _less(_worth(others), _worth(ranks)):
                ranges, ranks, better = moved, others, True
                break
    return None if _worth(ranks)[0] else ranges


def _times(costs: StageCosts) -> StageCost:
    """Seconds of a micro-batch through a stage, nothing recomputed and data axes apart."""
    price, splits_backward = costs.price, costs.context.splits_backward
    # Stages of the same contents take as long, to the last bit.
    known: dict[tuple[tuple[int, ...], bool, bool], float] = {}
    before, layers = price.counts_until, len(price.layers)

    def cost(_: int, start: int, stop: int) -> tuple[float, float]:
        counts = tuple(map(sub, before[stop], before[start]))
        if (key := (counts, start == 0, stop == layers)) not in known:
            known[key] = stage_time(price, stage_shape(price, start, stop), splits_backward).total_s
        return known[key], 0.0

    return cost


def _costs(costs: StageCosts, ranges: Ranges, pp: int) -> list[RankCost]:
    return [costs.rank_cost(rank, ranges[rank::pp]) for rank in range(pp)]


def _worth(ranks: Sequence[RankCost]) -> tuple[int, float, float]:
    """(ranks that do not fit, seconds of the slowest, bytes of the fullest of the others)."""
    fitting = [cost for cost in ranks if cost.time_s < inf]
    slowest_s = max((cost.time_s for cost in fitting), default=inf)
    return len(ranks) - len(fitting), slowest_s, max((cost.size_bytes for cost in fitting), default=inf)


def _worst(ranks: Sequence[RankCost]) -> list[bool]:
    """The ranks that take longest, or do not fit: moves take a layer away from one of them."""
    most = max(cost.time_s for cost in ranks)
    return [cost.time_s >= most * _SAME for cost in ranks]


def _less(one: tuple[int, float, float], other: tuple[int, float, float]) -> bool:
    """Whether the first that differs by more than rounding is smaller."""
    for a, b in zip(one, other, strict=True):
        if a < b * _SAME:
            return True
        if b < a * _SAME:
            return False
    return False


def _moved_layers(ranges: Ranges, giving: Sequence[bool]) -> Iterator[Ranges]:
    """A layer from a stage of one of the ranks to the next, or to the one before; none is left without."""
    cuts, pp = [start for start, _ in ranges[1:]], len(giving)
    ends = (ranges[0][0], ranges[-1][1])
    for place, step in product(range(len(cuts)), (-1, 1)):
        giver = place if step < 0 else place + 1
        if not giving[giver % pp]:
            continue
        bounds = (ends[0], *cuts[:place], cuts[place] + step, *cuts[place + 1 :], ends[1])
        if all(a < b for a, b in pairwise(bounds)):
            yield tuple(pairwise(bounds))
