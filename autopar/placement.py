"""Placements: how a tensor and its gradient lie on one mesh axis (DESIGN: the type system).

| placement            | value on each rank | gradient on each rank                                |
|----------------------|--------------------|------------------------------------------------------|
| Replicate            | the whole tensor   | the whole gradient                                   |
| Replicate, grad Partial | the whole tensor | a summand (each rank used it for different work)     |
| Shard(d)             | a slice of dim d   | the same slice                                       |
| Partial              | a summand          | the whole gradient                                   |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Kind(Enum):
    REPLICATE = "R"
    GRAD_PARTIAL = "Rp"
    SHARD = "S"
    PARTIAL = "P"


@dataclass(frozen=True, order=False)
class Placement:
    kind: Kind
    dim: int = 0  # of Shard only
    runs: Any = 1  # of a Shard on dp: runs of consecutive rows in which a slice lies (data_axis.py), a sympy number

    def __str__(self) -> str:
        if self.kind is not Kind.SHARD:
            return str(self.kind.value)
        return f"S({self.dim})" if self.runs == 1 else f"S({self.dim} in {self.runs} runs)"

    @property
    def is_shard(self) -> bool:
        return self.kind is Kind.SHARD

    @property
    def whole(self) -> bool:
        """Every rank holds the whole value."""
        return self.kind in (Kind.REPLICATE, Kind.GRAD_PARTIAL)

    @staticmethod
    def parse(text: str) -> Placement:
        """The inverse of `str`; raises ValueError."""
        if match := re.fullmatch(r"S\((\d+)\)", text.strip()):
            return Shard(int(match[1]))
        return Placement(Kind(text.strip()))


REPLICATE = Placement(Kind.REPLICATE)
GRAD_PARTIAL = Placement(Kind.GRAD_PARTIAL)
PARTIAL = Placement(Kind.PARTIAL)


def Shard(dim: int) -> Placement:  # noqa: N802 - reads as the type it makes
    return Placement(Kind.SHARD, dim)


@dataclass(frozen=True)
class Conversion:
    """One line of the conversion table: the runtime function and the collectives it costs.

    `function` is the name in autopar.runtime.collectives ("" where only the type changes);
    `forward` and `backward` name the collective each direction communicates with, or None.
    """

    function: str
    forward: str | None
    backward: str | None


# One row a line, as in DESIGN §4. Keys are the kinds of placement; the dims are arguments.
CONVERSIONS: dict[tuple[Kind, Kind], Conversion] = {
    (Kind.REPLICATE, Kind.GRAD_PARTIAL): Conversion("copy_to", None, "all_reduce"),
    (Kind.REPLICATE, Kind.SHARD): Conversion("split", None, "all_gather"),
    (Kind.SHARD, Kind.REPLICATE): Conversion("gather", "all_gather", None),
    (Kind.SHARD, Kind.GRAD_PARTIAL): Conversion("all_gather", "all_gather", "reduce_scatter"),
    (Kind.PARTIAL, Kind.REPLICATE): Conversion("all_reduce", "all_reduce", None),
    (Kind.PARTIAL, Kind.SHARD): Conversion("reduce_scatter", "reduce_scatter", "all_gather"),
    (Kind.SHARD, Kind.SHARD): Conversion("all_to_all", "all_to_all", "all_to_all"),
    (Kind.GRAD_PARTIAL, Kind.SHARD): Conversion("take_shard", None, None),
    (Kind.GRAD_PARTIAL, Kind.REPLICATE): Conversion("grad_from_first", None, None),
    (Kind.REPLICATE, Kind.PARTIAL): Conversion("value_from_first", None, None),
    (Kind.PARTIAL, Kind.GRAD_PARTIAL): Conversion("all_reduce_both", "all_reduce", "all_reduce"),
    (Kind.GRAD_PARTIAL, Kind.PARTIAL): Conversion("both_from_first", None, None),
    (Kind.SHARD, Kind.PARTIAL): Conversion("pad_shard", None, None),
}


def conversion(source: Placement, target: Placement) -> Conversion | None:
    """The conversion between two placements; None where they are the same or none exists."""
    if source == target or source.runs != 1 or target.runs != 1:
        return None
    return CONVERSIONS.get((source.kind, target.kind))


@dataclass(frozen=True)
class Strategy:
    """The placements of one op on one axis: what it wants of its tensor inputs, and what it gives."""

    inputs: tuple[Placement, ...]
    output: Placement

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {self.output}".strip()

    @staticmethod
    def parse(text: str) -> Strategy:
        left, right = text.split("->")
        return Strategy(tuple(Placement.parse(p) for p in left.split(",") if p.strip()), Placement.parse(right))
