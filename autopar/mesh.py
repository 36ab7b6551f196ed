"""The mesh of processes: axes outer to inner are pp, dp, cp, tp."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

AXES = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """Sizes of the four axes. Rank = ((pp·dp + d)·cp + c)·tp + t, tp innermost (neighbours on NVLink)."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    @cached_property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def size(self, axis: str) -> int:
        value: int = getattr(self, axis)
        return value

    def __str__(self) -> str:
        return "·".join(f"{axis}{self.size(axis)}" for axis in AXES if self.size(axis) > 1) or "1 process"
