"""Stage boundaries against enumeration of all splits."""

from __future__ import annotations

from itertools import combinations
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.search.boundaries import Ranges, StageCost, split

layer_times = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def all_splits(layers: int, stages: int) -> list[Ranges]:
    cuts = combinations(range(1, layers), stages - 1)
    return [tuple(zip((0, *cut), (*cut, layers), strict=True)) for cut in cuts]


def worst(ranges: Ranges, cost: StageCost) -> tuple[float, float]:
    times, sizes = zip(*(cost(stage, *at) for stage, at in enumerate(ranges)), strict=True)
    return max(times), max(sizes)


@given(layer_times, st.lists(st.integers(1, 9), min_size=8, max_size=8), st.integers(1, 4), st.integers(5, 60))
def test_the_split_is_the_best_of_all(times: list[int], sizes: list[int], stages: int, room: int) -> None:
    layers = len(times)

    def cost(stage: int, start: int, stop: int) -> tuple[float, float]:
        """Earlier stages hold more micro-batches, as in 1f1b."""
        size = (stages - stage) * sum(sizes[start:stop])
        return (float(sum(times[start:stop])), float(size)) if size <= room else (inf, inf)

    prefix = [float(sum(times[:n])) for n in range(layers + 1)]
    costs = [worst(ranges, cost) for ranges in all_splits(layers, stages)]
    best = min(costs, default=(inf, inf))
    for ranges in (split(layers, stages, cost), split(layers, stages, cost, prefix, inf, True)):
        if best[0] == inf:
            assert ranges is None
        else:
            assert ranges is not None and worst(ranges, cost) == best


def test_layers_that_do_not_divide() -> None:
    ranges = split(7, 3, lambda stage, start, stop: (float(stop - start), 0.0))
    assert ranges is not None and max(stop - start for start, stop in ranges) == 3
    assert [layer for start, stop in ranges for layer in range(start, stop)] == list(range(7))


@pytest.mark.parametrize(("layers", "stages"), [(2, 3), (1, 2)])
def test_more_stages_than_layers(layers: int, stages: int) -> None:
    assert split(layers, stages, lambda *at: (1.0, 1.0)) is None
