"""The work of a tile of attention scores."""

from autopar.runtime.tiles import Tile


def area(tile: Tile) -> int:
    """Scores to compute."""
    rows, keys = len(tile.rows), len(tile.keys)
    return rows * keys if tile.shape == "full" else rows * (rows + 1) // 2
