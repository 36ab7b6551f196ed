"""Layers that are declared or called by the same line: runs, each a loop; and where the layers are."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from ..ir.graph import Call, Program
from ..ir.identifiers import is_index
from .text import is_plain_part, quoted


def runs(program: Program, key: Callable[[Call], Any]) -> list[range]:
    """Maximal runs of neighbours in one list with the same key, by their places among all layer calls.

    What is between two layers is alone.
    """
    calls = program.layer_calls
    keys = [(parent(call), key(call)) for call in calls]
    alone = [program.is_between(call.block) for call in calls]
    starts = [i for i in range(len(calls)) if i == 0 or keys[i] != keys[i - 1] or any(alone[i - 1 : i + 1])]
    return [range(start, stop) for start, stop in pairwise([*starts, len(calls)])]


def parent(call: Call) -> str:
    """The list that a layer is in."""
    return call.path.rpartition(".")[0]


def offset(program: Program, run: range) -> int | None:
    """A layer's index in the program minus its number in its list, the same for all layers of a run.

    None where the numbers are not consecutive, or a path has no number or is not plain.
    """
    paths = [call.path for call in program.layer_calls[run.start : run.stop]]
    before, _, first = paths[0].rpartition(".")
    if not all(map(is_plain_part, paths[0].split("."))) or not is_index(first):
        return None
    numbers = range(int(first), int(first) + len(run))
    return run.start - int(first) if paths == [f"{before}.{i}".lstrip(".") for i in numbers] else None


def path_text(program: Program, run: range, index: str) -> str:
    """The path of layer `index` of a run, as source: f"model.layers.{i}"."""
    calls = program.layer_calls[run.start : run.stop]
    if len(calls) == 1:
        return quoted(calls[0].path)
    if (number := number_text(program, run, index)) is None:
        return f"PATHS[{index}]"
    return f'f"{parent(calls[0])}.{{{number}}}"' if parent(calls[0]) else f"str({number})"


def number_text(program: Program, run: range, index: str) -> str | None:
    """The number in its list of layer `index` of a run, as source: i - 2; None where the layers have none."""
    less = offset(program, run)
    if less is None or len(program.stages) == 1:
        return None if less is None else index
    return index if not less else f"{index} - {less}" if less > 0 else f"{index} + {-less}"


def layers_text(program: Program, run: range) -> str:
    """The indices of a run's layers that this stage has, as source; with one stage, their numbers in the list."""
    if len(program.stages) == 1:
        less = offset(program, run) or 0
        return f"range({run.start - less}, {run.stop - less})" if run.start != less else f"range({len(run)})"
    if run.start == 0 and run.stop == len(program.layer_calls):
        return "range(self._start, self._stop)"
    return f"self._range({run.start}, {run.stop})"


def lists(program: Program) -> list[str]:
    """The paths of the lists that have the layers."""
    return list(dict.fromkeys(parent(c) for c in program.layer_calls if not program.is_between(c.block)))
