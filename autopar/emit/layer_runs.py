"""Layers that are declared or called by the same line: runs, each a loop; and where the layers are."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir.graph import Call, Program


@dataclass(frozen=True)
class Run:
    """Layers [start, stop) of a program, by their place among all layer calls."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def runs(program: Program, key: Callable[[Call], Any]) -> list[Run]:
    """Maximal runs of neighbours in one list with the same key; what is between two lists is alone."""
    calls = program.layer_calls
    starts = [
        place
        for place, call in enumerate(calls)
        if not place
        or is_between(call.block) != is_between(calls[place - 1].block)
        or parent(call) != parent(calls[place - 1])
        or key(call) != key(calls[place - 1])
    ]
    return [Run(start, stop) for start, stop in zip(starts, [*starts[1:], len(calls)], strict=True)]


def is_between(block: str) -> bool:
    """Whether a block is what comes between two lists of layers: it runs as a layer does, but is none."""
    return re.fullmatch(r"between\d*", block) is not None


def parent(call: Call) -> str:
    """The list that a layer is in."""
    return call.path.rpartition(".")[0]


def path_text(program: Program, run: Run, index: str) -> str:
    """The path of layer `index` of a run, as source: f"model.layers.{i}"."""
    calls = program.layer_calls[run.start : run.stop]
    own, first = parent(calls[0]), calls[0].path.rpartition(".")[2]
    dot = f"{own}." if own else ""
    if len(calls) == 1:
        return f'"{calls[0].path}"'
    offset = run.start - int(first)
    if [call.path for call in calls] != [f"{dot}{i - offset}" for i in range(run.start, run.stop)]:
        return f"PATHS[{index}]"
    shown = index if not offset else f"{index} - {offset}" if offset > 0 else f"{index} + {-offset}"
    return f'f"{dot}{{{shown}}}"' if dot else f"str({shown})"


def layers_text(program: Program, run: Run) -> str:
    """The indices of a run's layers that this stage has, as source."""
    if len(program.stages) == 1:
        return f"range({run.start}, {run.stop})" if run.start else f"range({run.stop})"
    if run.start == 0 and run.stop == len(program.layer_calls):
        return "range(self._start, self._stop)"
    return f"self._range({run.start}, {run.stop})"


def lists(program: Program) -> list[str]:
    """Where the layers are: the paths of their lists."""
    return list(dict.fromkeys(parent(c) for c in program.layer_calls if not is_between(c.block)))


def needs_paths(program: Program, found: Sequence[Run]) -> bool:
    return any("PATHS" in path_text(program, run, "i") for run in found)
