"""Pins, cluster and batch that cannot go together: refused with the arithmetic and the way out."""

from __future__ import annotations

from autopar.cost_models.hardware import Cluster
from autopar.errors import PlanError
from autopar.plan.plan import asked_length, check_cut, check_precision

from .pins import Pins, Request
from .sizes import divisors, listed


def check(request: Request, cluster: Cluster, context: bool = False) -> None:
    """PlanError, with the arithmetic, where pins and cluster or batch cannot go together. context: cp may be free."""
    pins, gpus, batch = request.pins, cluster.gpus, request.batch.global_batch
    check_precision(request.compute)
    if pins.cp is not None and request.batch.sequence > 1:
        check_cut(request.batch, pins.cp)
    if pins.attention is not None and pins.cp is None and not context:
        parts = next((f"pad_to_multiple_of={2 * c}, " for c in divisors(gpus) if c > 1), "")
        raise PlanError(
            f"attention={pins.attention!r} is for cp > 1, and none divides gpus={gpus} and "
            f"{asked_length(request.batch)}: use {parts}another length or number of GPUs, or leave it free"
        )
    sizes = {name: getattr(pins, name) for name in ("pp", "dp", "cp", "tp") if getattr(pins, name) is not None}
    pinned = 1
    for size in sizes.values():
        pinned *= size
    text = " × ".join(f"{name}={size}" for name, size in sizes.items())
    if gpus % pinned:
        low, high = gpus // pinned * pinned, -(-gpus // pinned) * pinned
        counts = " or ".join(str(count) for count in (low, high) if count)
        way = f"use gpus={counts}"
        if len(sizes) == 1:
            way += f", or {next(iter(sizes))} one of {listed(divisors(gpus))}"
        raise PlanError(f"gpus={gpus} is not divisible by {text}{f' = {pinned}' if len(sizes) > 1 else ''}: {way}")
    if len(sizes.keys() - {"cp"}) == 3 and pinned != gpus and not (context and pins.cp is None):
        raise PlanError(f"{text} = {pinned} leaves {gpus - pinned} of gpus={gpus} idle: use gpus={pinned}, or free one")
    samples = (pins.dp or 1) * (pins.micro_batch or 1)
    if batch % samples:
        _refuse_batch(pins, batch, samples)


def _refuse_batch(pins: Pins, batch: int, samples: int) -> None:
    names = [f"{name}={getattr(pins, name)}" for name in ("micro_batch", "dp") if getattr(pins, name)]
    low, high = batch // samples * samples, -(-batch // samples) * samples
    counts = " or ".join(str(count) for count in (low, high) if count)
    product_text = f" = {samples}" if len(names) > 1 else ""
    raise PlanError(
        f"global_batch={batch} is not divisible by {' × '.join(names)}{product_text}: "
        f"use global_batch={counts}, or values whose product divides it (one of {listed(divisors(batch))})"
    )
