"""Which parts of the score matrix are computed where, when the sequence of an attention is cut over c ranks.

A rank has one chunk of c, in order, or with `zigzag` the chunks r and 2c − 1 − r of 2c: under a causal mask every rank
then has the same work. What is seen is cut into rectangles and triangles: no masked score is computed, no mask held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

# Which pairs (row, key) of a tile see each other: all, those with key ≤ row, or those with key ≥ row.
Shape = Literal["full", "lower", "upper"]


class Tile(NamedTuple):
    """Rows and keys, counted from the first that are at hand, and which of their pairs see each other."""

    rows: range
    keys: range
    shape: Shape


@dataclass(frozen=True)
class Layout:
    """The cut of a sequence over `size` ranks, into `rows` queries and `keys` keys each, and which see each other."""

    size: int
    rows: int
    keys: int
    causal: bool
    zigzag: bool
    window: int | None  # under a causal mask, the last keys that a row sees, its own among them

    def __post_init__(self) -> None:
        assert self.window is None or (self.causal and self.window > 0), "a sliding window is causal, and not empty"
        assert not self.causal or self.rows == self.keys, "a causal mask needs as many queries as keys"
        assert not self.zigzag or self.rows % 2 == 0, "zigzag needs an even number of tokens on each rank"

    def pieces(self, rank: int) -> list[range]:
        """The positions of a rank's tokens."""
        places = (rank, 2 * self.size - 1 - rank) if self.zigzag else (rank,)
        length = self.rows // len(places)
        return [range(i * length, (i + 1) * length) for i in places]


@cache
def ring_tiles(layout: Layout, rank: int, block: int) -> tuple[Tile, ...]:
    """The tiles that the rows of `rank` see of the keys of `block`."""
    if layout.window is not None:
        return _tiles(layout.pieces(rank), layout.pieces(block), layout.window)
    rows, keys = range(layout.rows), range(layout.keys)
    if not layout.causal:
        return (Tile(rows, keys, "full"),)
    if rank == block:  # in the order of their positions, whatever lies between
        return (Tile(rows, keys, "lower"),)
    if not layout.zigzag:
        return (Tile(rows, keys, "full"),) if block < rank else ()
    half = layout.rows // 2
    return (Tile(rows, keys[:half], "full") if block < rank else Tile(rows[half:], keys, "full"),)


@cache
def whole_tiles(layout: Layout, rank: int) -> tuple[Tile, ...]:
    """The tiles that the rows of `rank` see of all keys, under a causal mask."""
    return _tiles(layout.pieces(rank), [range(layout.size * layout.keys)], layout.window)


@cache
def hops(layout: Layout, block: int) -> int:
    """The number of times that a block is passed on around the ring: until no rank after needs it."""
    needed = (step for step in range(1, layout.size) if ring_tiles(layout, (block + step) % layout.size, block))
    return max(needed, default=0)


def _tiles(rows: Sequence[range], keys: Sequence[range], window: int | None) -> tuple[Tile, ...]:
    return tuple(
        Tile(
            _moved(tile.rows, i * len(ours) - ours.start), _moved(tile.keys, j * len(theirs) - theirs.start), tile.shape
        )
        for i, ours in enumerate(rows)
        for j, theirs in enumerate(keys)
        for tile in _seen(ours, theirs, window)
    )


def _seen(rows: range, keys: range, window: int | None) -> list[Tile]:
    """The pairs with row − window < key ≤ row."""
    if window is None:
        return _lower(rows, keys)
    tiles: list[Tile] = []
    for start in range(rows.start, rows.stop, window):
        for tile in _lower(range(start, min(start + window, rows.stop)), keys):
            # A triangle of so few rows lies in the window.
            tiles += [tile] if tile.shape == "lower" else _upper(tile.rows, tile.keys, window - 1)
    return tiles


def _lower(rows: range, keys: range) -> list[Tile]:
    """The pairs with key ≤ row: a triangle, the keys before it, the rows after it."""
    square = range(max(rows.start, keys.start), min(rows.stop, keys.stop))
    before, after = range(keys.start, square.start), range(max(rows.start, keys.stop), rows.stop)
    tiles = Tile(square, before, "full"), Tile(square, square, "lower"), Tile(after, keys, "full")
    return [tile for tile in tiles if tile.rows and tile.keys]


def _upper(rows: range, keys: range, reach: int) -> list[Tile]:
    """The pairs with key ≥ row − reach: row ≤ key + reach, the same with rows and keys exchanged."""
    mirrored = _lower(_moved(keys, reach), rows)
    return [Tile(t.keys, _moved(t.rows, -reach), "upper" if t.shape == "lower" else "full") for t in mirrored]


def _moved(positions: range, by: int) -> range:
    return range(positions.start + by, positions.stop + by)
