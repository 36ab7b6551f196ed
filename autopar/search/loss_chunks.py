"""In how many slices of the vocabulary head and loss may be computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from autopar.cost_models.block import BlockPrice
from autopar.cost_models.compute import ModelPrice
from autopar.cost_models.layer_costs import ModelCosts
from autopar.errors import PlanError

from .pins import Pins, Request

# Slices are doubled until what they leave of the logits is this share of the budget: more would free no more.
_WORTH_FREEING = 0.01
_BYTES = "saved_bytes", "working_bytes", "logits_bytes", "logits_peak_bytes", "waiting_bytes"


@dataclass(frozen=True)
class LossPrices:
    """A model in each number of slices of its loss, fewest first.

    relaxed: as fast as with the fewest, keeping as little as with the most: where no stages of it fit within a limit,
    none of theirs do (of virtual stages, none near the best). None where there is nothing to choose, or more slices are
    not slower in every part of a step, or differ in more than seconds and bytes.
    """

    each: tuple[ModelPrice, ...]
    relaxed: ModelPrice | None


def loss_prices(price: ModelPrice, request: Request) -> LossPrices:
    """The model with whole logits, then with them in 2, 4, 8, … slices; or as pinned."""
    each = tuple(_loss_prices(price, request))
    return LossPrices(each, _relaxed(each))


def _loss_prices(price: ModelPrice, request: Request) -> Iterator[ModelPrice]:
    pins, chunks = request.pins, 1
    if pins.loss_chunks is not None:
        yield price.with_chunks(pins.loss_chunks)
        return
    while True:
        made = price.with_chunks(chunks)
        if pins.allows("loss_chunks", chunks):
            yield made
        if price.epilogue_in is None or made.epilogue.logits_peak_bytes <= _WORTH_FREEING * request.budget_bytes:
            return
        chunks *= 2


def _relaxed(prices: Sequence[ModelPrice]) -> ModelPrice | None:
    ends = [price.epilogue for price in prices]
    times = [[phase.total_s for phase in (end.forward, end.backward, *end.dgrad_wgrad)] for end in ends]
    slower = all(fewer <= more for pair in pairwise(times) for fewer, more in zip(*pair, strict=True))
    others = {f.name for f in fields(BlockPrice)} - {"forward", "backward", "dgrad_wgrad", *_BYTES}
    alike = all(getattr(end, name) == getattr(ends[0], name) for end in ends for name in others)
    if len(prices) < 2 or not slower or not alike:
        return None
    least = {name: min(getattr(end, name) for end in ends) for name in _BYTES}
    # So many slices has none of them: costs of a last stage are known by that number (stages.Known).
    return replace(prices[0], epilogue=replace(ends[0], **least), loss_chunks=2 * prices[-1].loss_chunks)


def smallest_logits(price: ModelPrice, request: Request) -> ModelPrice:
    """The model with as little of its logits at once as the search may choose."""
    return (price, *loss_prices(price, request).each)[-1]


def chunkable(models: Sequence[ModelCosts], pins: Pins) -> Sequence[ModelCosts]:
    """The solutions that allow a pinned number of slices; PlanError where none does."""
    if pins.loss_chunks in (None, 1):
        return models
    found = [costs for costs in models if costs.chunked is not None]
    if not found:
        raise PlanError(f"loss_chunks={pins.loss_chunks}: {models[0].not_chunked}; use loss_chunks=1")
    return found
