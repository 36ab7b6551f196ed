"""What backward computes again instead of keeping it: regions of a layer, whole layers, or groups of layers.

| word           | what runs again in backward                                 | what is kept of it            |
|----------------|-------------------------------------------------------------|-------------------------------|
| attention core | from the projections of q, k, v up to the output projection | q, k, v                       |
| attention      | from the norm up to the output projection                   | the residual stream           |
| activation     | what lies between the MLP's projections                     | what the up-projections give  |
| mlp            | from the norm up to the down-projection                     | the residual stream           |
| layer          | the layer                                                   | what it reads                 |
| groups of k    | k layers after each other, as one                           | what the first of them reads  |
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import PlanError
from ..runtime.choices import choice as field_of

LAYER = "layer"
MOST_LAYERS = 100_000  # beyond any model; a range of layers is written out
# Each whole sublayer with the part of it that is a region of its own.
PARTS = {"attention": "attention core", "mlp": "activation"}
REGIONS = ("attention core", "attention", "activation", "mlp")
FORM = f"{', '.join(map(repr, REGIONS))} (several: 'attention core, mlp'), '{LAYER}' or 'groups of 2'"


@dataclass(frozen=True)
class RecomputeChoice:
    """Layers [start, stop), of each of which backward computes `what` again: a text of `choice`."""

    start: int
    stop: int
    what: str = LAYER

    @property
    def regions(self) -> tuple[str, ...]:
        """The regions by name; none where whole layers are computed again."""
        return regions_of(self.what)

    @property
    def group(self) -> int:
        """How many layers are one group."""
        return group_of(self.what)

    @property
    def layers(self) -> range:
        return range(self.start, self.stop)


@dataclass(frozen=True)
class RecomputeRegion:
    """Ops of a layer class, by node name and in order, that backward computes again as one; the last one is its result.

    always: in each layer of the class.
    """

    name: str
    ops: tuple[str, ...]
    always: bool


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What of forward is not kept for backward.

    recompute: what backward computes again, by ranges of layers in ascending order. loss_chunks: slices of the
    vocabulary in which head and loss are computed together, 1 for whole logits.
    """

    recompute: tuple[RecomputeChoice, ...] = field_of(
        "recompute", "none, full, regions (attention core, mlp), groups of 2, layers a stage (2), or layers (0,1,5)"
    )
    loss_chunks: int = field_of("slices", "slices of the vocabulary for head and loss, 1 for none", default=1)


def choice(text: str) -> str:
    """The one way to write a choice; PlanError with what there is where it is none."""
    text = " ".join(text.replace("_", " ").split())
    if text in (LAYER, "groups of 1"):
        return LAYER
    if re.fullmatch(r"groups of [1-9]\d{0,4}", text):
        return text
    given = {part.strip() for part in text.split(",")}
    if not given <= {*REGIONS}:
        raise PlanError(f"recompute={text!r}: use {FORM}")
    within = {part for whole, part in PARTS.items() if whole in given}
    return ", ".join(name for name in REGIONS if name in given - within)


def regions_of(what: str) -> tuple[str, ...]:
    """The regions that a choice names, in their order in a layer."""
    return () if is_whole(what) else tuple(what.split(", "))


def group_of(what: str) -> int:
    """The size of a choice's groups: 1 but for "groups of k"."""
    return int(what.removeprefix("groups of ")) if what.startswith("groups of ") else 1


def is_whole(what: str) -> bool:
    """Whether a choice is of whole layers, one or a group at a time."""
    return what == LAYER or group_of(what) > 1


def recompute_choices(layers: Mapping[int, str]) -> tuple[RecomputeChoice, ...]:
    """Layer → choice, as ranges of neighbours with the same one."""
    made: list[RecomputeChoice] = []
    for layer, what in sorted(layers.items()):
        if made and made[-1].stop == layer and made[-1].what == what:
            made[-1] = RecomputeChoice(made[-1].start, layer + 1, what)
        else:
            made.append(RecomputeChoice(layer, layer + 1, what))
    return tuple(made)


def whole_layers(layers: Iterable[int]) -> tuple[RecomputeChoice, ...]:
    """Each of these layers whole, by itself."""
    return recompute_choices(dict.fromkeys(layers, LAYER))


def by_layer(recompute: Iterable[RecomputeChoice]) -> dict[int, str]:
    """Layer → choice; the inverse of `again_of`."""
    return {layer: chosen.what for chosen in recompute for layer in chosen.layers}


def to_plain(recompute: Iterable[RecomputeChoice]) -> dict[str, str]:
    """As a plan.yaml has it: {"0-11": "attention core", "12": "layer"}, first and last layer of each range."""
    return {_range_text(chosen): chosen.what for chosen in recompute}


def from_plain(data: Any) -> tuple[RecomputeChoice, ...]:
    """The inverse of `to_plain`; a list of layers, as older plans have, is layers that are recomputed whole."""
    if isinstance(data, list):
        return whole_layers(data)
    chosen: dict[int, str] = {}
    for key, what in data.items():
        first, _, last = str(key).partition("-")
        for layer in range(int(first), int(last or first) + 1):
            if layer in chosen:
                raise PlanError(f"recompute: layer {layer} is in two ranges: give each layer once")
            chosen[layer] = choice(what)
    return recompute_choices(chosen)


def is_plain(data: Any) -> bool:
    """Whether `from_plain` can read it: a list of layers, or ranges of layers with words."""
    if isinstance(data, list):
        return all(
            isinstance(layer, int) and not isinstance(layer, bool) and 0 <= layer < MOST_LAYERS for layer in data
        )
    return isinstance(data, dict) and all(
        re.fullmatch(r"\d{1,5}(-\d{1,5})?", str(key)) and isinstance(what, str) for key, what in data.items()
    )


def summary(recompute: Iterable[RecomputeChoice], layers: int) -> str:
    """ "none", "full", "attn core", "12 of 32 layers", "20 attn core + 12 mlp", of a model of so many layers."""
    counts = Counter(by_layer(recompute).values())
    if not counts:
        return "none"
    if counts == {LAYER: layers}:
        return "full"
    if set(counts) == {LAYER}:
        return f"{counts[LAYER]} of {layers} layers"
    short = {what: what.replace("attention", "attn") for what in counts}
    if len(counts) == 1 and counts.total() == layers:
        return next(iter(short.values()))
    return " + ".join(f"{n} {short[what]}" for what, n in counts.items())


def _range_text(chosen: RecomputeChoice) -> str:
    return str(chosen.start) if chosen.stop == chosen.start + 1 else f"{chosen.start}-{chosen.stop - 1}"
