"""Communication over the data axis, and how much hides behind computing. First form: no mutual slow-down.

gathers:    unit i's all-gather runs while unit i−1 computes (prefetch depth 1): exposed = the first one's,
            plus what each other one takes longer than the unit before it
reductions: unit i's gradient is ready when its backward ends; they queue on one stream: exposed = what is
            left after the last backward (an exact simulation over the units)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Overlap:
    """Seconds of communication that delay the step, and seconds that do not."""

    exposed_s: float = 0.0
    hidden_s: float = 0.0

    def __add__(self, other: Overlap) -> Overlap:
        return Overlap(self.exposed_s + other.exposed_s, self.hidden_s + other.hidden_s)


def gathers(compute_s: Sequence[float], gather_s: Sequence[float], share: float = 1.0) -> Overlap:
    """All-gathers of the units in the order they compute; `share` of a collective can be hidden."""
    if not gather_s:
        return Overlap()
    exposed = gather_s[0]
    for compute, gather in zip(compute_s, gather_s[1:], strict=False):
        exposed += max(gather * (1 - share), gather - compute)
    return Overlap(exposed, sum(gather_s) - exposed)


def reductions(compute_s: Sequence[float], reduce_s: Sequence[float], share: float = 1.0) -> Overlap:
    """Reductions of the units in the order their backward ends; `share` of a collective can be hidden."""
    ready = stream = blocked = 0.0
    for compute, reduce in zip(compute_s, reduce_s, strict=True):
        ready += compute + reduce * (1 - share)
        blocked += reduce * (1 - share)
        stream = max(stream, ready) + reduce * share
    exposed = blocked + max(0.0, stream - ready)
    return Overlap(exposed, sum(reduce_s) - exposed)
