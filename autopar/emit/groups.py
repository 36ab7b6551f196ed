"""Groups of layers that are recomputed as one: where they are, and the units of data parallelism that they are."""

from __future__ import annotations

from ..ir.graph import Program
from ..plan.recompute import Again
from .emission import tuple_text
from .layer_runs import Run, offset, parent


def group_of_layer(program: Program, layer: int) -> Again | None:
    """The range of groups that a layer is in."""
    return next((again for again in program.recompute if again.group > 1 and layer in again.layers), None)


def method_name(program: Program, again: Again) -> str:
    """The method that computes a group of a range."""
    several = sum(other.group > 1 for other in program.recompute) > 1
    return f"_layers_{again.start}" if several else "_layers"


def constant(program: Program) -> list[str]:
    """GROUPS: the paths of each group's layers, which are gathered for it as one."""
    rows = [f"    *({_row(program, again)})," for again in program.recompute if again.group > 1]
    return ["GROUPS = (  # layers that are recomputed as one are one unit", *rows, ")"] if rows else []


def _row(program: Program, again: Again) -> str:
    paths = [call.path for call in program.layer_calls[again.start : again.stop]]
    less = offset(program, Run(again.start, again.stop))
    if less is None:
        groups = [tuple(paths[i : i + again.group]) for i in range(0, len(paths), again.group)]
        return f"{', '.join(map(tuple_text, groups))},"
    path = f"{parent(program.layer_calls[again.start])}.{{i}}".lstrip(".")
    firsts = f"range({again.start - less}, {again.stop - less}, {again.group})"
    return f'[f"{path}" for i in range(first, first + {again.group})] for first in {firsts}'
