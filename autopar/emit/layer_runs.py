"""Layers that are declared or called by the same line: runs, each a loop; and where the layers are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..ir.graph import Call, Program
from ..ir.identifiers import is_index
from .text import is_plain_part, quoted


@dataclass(frozen=True)
class Run:
    """Layers [start, stop) of a program, by their place among all layer calls."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def places(self) -> range:
        return range(self.start, self.stop)


def runs(program: Program, key: Callable[[Call], Any]) -> list[Run]:
    """Maximal runs of neighbours in one list with the same key; what is between two layers is alone."""
    calls = program.layer_calls
    starts = [
        place
        for place, call in enumerate(calls)
        if not place
        or program.is_between(call.block)
        or program.is_between(calls[place - 1].block)
        or parent(call) != parent(calls[place - 1])
        or key(call) != key(calls[place - 1])
    ]
    return [Run(start, stop) for start, stop in pairwise([*starts, len(calls)])]


def parent(call: Call) -> str:
    """The list that a layer is in."""
    return call.path.rpartition(".")[0]


def offset(program: Program, run: Run) -> int | None:
    """A layer's index in the program minus its number in its list, the same for all layers of a run.

    None where the numbers are not consecutive, or a path has no number or is not plain.
    """
    paths = [call.path for call in program.layer_calls[run.start : run.stop]]
    before, _, first = paths[0].rpartition(".")
    if not all(map(is_plain_part, paths[0].split("."))) or not is_index(first):
        return None
    numbers = range(int(first), int(first) + len(run))
    return run.start - int(first) if paths == [f"{before}.{i}".lstrip(".") for i in numbers] else None


def path_text(program: Program, run: Run, index: str) -> str:
    """The path of layer `index` of a run, as source: f"model.layers.{i}"."""
    calls = program.layer_calls[run.start : run.stop]
    if len(calls) == 1:
        return quoted(calls[0].path)
    if (number := number_text(program, run, index)) is None:
        return f"PATHS[{index}]"
    return f'f"{parent(calls[0])}.{{{number}}}"' if parent(calls[0]) else f"str({number})"


def number_text(program: Program, run: Run, index: str) -> str | None:
    """The number in its list of layer `index` of a run, as source: i - 2; None where the layers have none."""
    less = offset(program, run)
    if less is None or len(program.stages) == 1:
        return None if less is None else index
    return index if not less else f"{index} - {less}" if less > 0 else f"{index} + {-less}"


def layers_text(program: Program, run: Run) -> str:
    """The indices of a run's layers that this stage has, as source; with one stage, their numbers in the list."""
    if len(program.stages) == 1:
        less = offset(program, run) or 0
        return f"range({run.start - less}, {run.stop - less})" if run.start != less else f"range({len(run)})"
    if run.start == 0 and run.stop == len(program.layer_calls):
        return "range(self._start, self._stop)"
    return f"self._range({run.start}, {run.stop})"


def lists(program: Program) -> list[str]:
    """Where the layers are: the paths of their lists."""
    return list(dict.fromkeys(parent(c) for c in program.layer_calls if not program.is_between(c.block)))
