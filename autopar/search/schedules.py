"""Which schedules are searched, with how many stages a rank; reasons for the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autopar.plan.schedules import MULTI_STAGE, why_not
from autopar.runtime.choices import SCHEDULES

if TYPE_CHECKING:
    from .pins import Pins

_VIRTUAL = {"interleaved": (2, 4), "zero-bubble": (1,)}  # stages a rank that are searched; others can be pinned


def schedules(pp: int, micro_batches: int, layers: int, pins: Pins) -> Iterator[tuple[str, int]]:
    """(schedule, virtual stages). 1f1b comes first: as fast as gpipe with fewer micro-batches in flight."""
    pinned = pins.virtual_stages
    for schedule in ("none", "1f1b", "gpipe", *MULTI_STAGE):
        for v in (pinned,) if pinned is not None else _VIRTUAL.get(schedule, (1,)):
            legal = pp * v <= layers and not why_not(schedule, pp, v, micro_batches)
            if legal and pins.allows("schedule", schedule) and v not in pins.forbid.get("virtual_stages", ()):
                yield schedule, v


def recomputes(pins: Pins) -> bool:
    """Whether layers are recomputed whatever the plan."""
    return pins.recompute not in (None, "none", 0, ())


def schedule_reasons(pins: Pins, gpus: int, layers: int) -> list[str]:
    """Why schedules are left out: the pinned one, and zero-bubble wherever there is a pipeline."""
    reasons = []
    if pins.schedule == "1f1b":
        reasons.append("1f1b needs pp > 1 and at least pp micro-batches")
    if pins.schedule == "none" and pins.pp != 1:
        reasons.append("schedule=none is for pp=1")
    if pins.schedule is not None and pins.schedule not in SCHEDULES:
        reasons.append(f"schedule={pins.schedule} (there are {', '.join(SCHEDULES)})")
    if pins.schedule in MULTI_STAGE:
        least = "virtual_stages of 2 or more, " if pins.schedule == "interleaved" else ""
        reasons.append(f"{pins.schedule} needs pp > 1, {least}and micro-batches in m // pp equal rounds")
    if pins.virtual_stages is not None and pins.virtual_stages * (pins.pp or 2) > layers:
        reasons.append(f"virtual_stages={pins.virtual_stages} (pp · virtual_stages stages of {layers} layers)")
    if pins.virtual_stages is not None and pins.virtual_stages > 1:
        reasons.append("virtual_stages > 1 are for interleaved and zero-bubble")
    if min(gpus, layers) > 1 and pins.pp != 1 and pins.allows("schedule", "zero-bubble"):
        reasons.append("zero-bubble with zero=2 or 3 (its halves of a backward do not reshard)")
        reasons.append("zero-bubble with recompute (the second half would run it again)")
    return reasons
