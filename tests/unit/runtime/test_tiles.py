"""The tiles of every layout against its mask."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from autopar.runtime.tiles import Layout, Tile, hops, ring_tiles, whole_tiles
from tests.tiles import area

TOKENS = 6  # of a rank
LAYOUTS = [
    Layout(size, TOKENS, TOKENS, True, zigzag, window)
    for size, zigzag, window in itertools.product(
        (1, 2, 3, 4), (False, True), (None, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 23, 24, 30)
    )
]


def covered(tiles: tuple[Tile, ...], keys: int) -> Tensor:
    """How often each pair is computed."""
    counts = torch.zeros(TOKENS, keys, dtype=torch.long)
    for tile in tiles:
        block = torch.ones(len(tile.rows), len(tile.keys), dtype=torch.long)
        block = {"full": block, "lower": block.tril(), "upper": block.triu()}[tile.shape]
        assert tile.shape == "full" or len(tile.rows) == len(tile.keys)
        assert area(tile) == block.sum() > 0
        counts[tile.rows.start : tile.rows.stop, tile.keys.start : tile.keys.stop] += block
    return counts


def positions(layout: Layout, rank: int) -> Tensor:
    everything = torch.arange(layout.size * TOKENS)
    if not layout.zigzag:
        return everything.chunk(layout.size)[rank]
    chunks = everything.chunk(2 * layout.size)
    return torch.cat([chunks[rank], chunks[2 * layout.size - 1 - rank]])


def mask(layout: Layout, rows: Tensor, keys: Tensor) -> Tensor:
    distance = rows[:, None] - keys
    return (distance >= 0) & (distance < (layout.window or layout.size * TOKENS))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_pair_that_is_seen_is_computed_once(layout: Layout) -> None:
    ranks = range(layout.size)
    for rank in ranks:
        own = positions(layout, rank)
        assert torch.equal(own, torch.cat([torch.arange(p.start, p.stop) for p in layout.pieces(rank)]))
        everything = torch.arange(layout.size * TOKENS)
        whole = covered(whole_tiles(layout, rank), len(everything))
        assert torch.equal(whole, mask(layout, own, everything).long())
        for block in ranks:
            seen = mask(layout, own, positions(layout, block))
            assert torch.equal(covered(ring_tiles(layout, rank, block), TOKENS), seen.long())
    for block in ranks:
        needs = [step for step in ranks if ring_tiles(layout, (block + step) % layout.size, block)]
        assert hops(layout, block) == max(needs)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_zigzag_gives_every_rank_the_same_work_in_every_step(size: int) -> None:
    layout = Layout(size, TOKENS, TOKENS, True, True, None)
    for step in range(1, size):
        areas = {sum(area(t) for t in ring_tiles(layout, rank, (rank - step) % size)) for rank in range(size)}
        assert areas == {TOKENS * TOKENS // 2}


def test_one_tile_a_step_without_a_window() -> None:
    """Each is a kernel to launch."""
    for zigzag, rank, block in itertools.product((False, True), range(4), range(4)):
        assert len(ring_tiles(Layout(4, TOKENS, TOKENS, True, zigzag, None), rank, block)) <= 1


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ((2, 4, 4, False, False, 3), "a sliding window is causal"),
        ((2, 4, 4, True, False, 0), "not empty"),
        ((2, 4, 6, True, False, None), "as many queries as keys"),
        ((2, 5, 5, True, True, None), "an even number of tokens"),
    ],
)
def test_layouts_without_a_meaning_are_refused(layout: tuple[int, int, int, bool, bool, int | None], why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        Layout(*layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_ranks_or_none_take_part_in_the_first_transfer(layout: Layout) -> None:
    """NCCL wants it of the first batch of sends and receives of a group."""
    sends = [hops(layout, block) > 0 for block in range(layout.size)]
    assert len({sends[rank] or sends[rank - 1] for rank in range(layout.size)}) == 1
