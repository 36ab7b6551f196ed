"""Counts that a pass has made local."""

from __future__ import annotations


class Share(int):
    """A rank's share of a count (groups of channels); `whole` is the count itself, by which the rules judge."""

    whole: int

    @classmethod
    def of(cls, count: int, ranks: int) -> Share:
        share = cls(count // ranks)
        share.whole = count
        return share


def whole_count(count: int) -> int:
    """The count over all ranks."""
    return count.whole if isinstance(count, Share) else int(count)
