"""Give each pipeline stage its layers, and find what passes between stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from autopar.errors import PlanError
from autopar.ir.graph import TABLES, Program, Stage
from autopar.plan.plan import Plan
from autopar.rules.verify import Level


@dataclass(frozen=True)
class SplitStages:
    """Layers → stages. The prologue belongs to the first stage, the epilogue to the last, tables to all.

    Requires: a program of layers. Ensures: every layer is in exactly one stage; a value used several stages
    later is sent on by the stages between.

        stages ((0, 2), (2, 4))   |   Stage(0, 2, (), ("h_1",)), Stage(2, 4, ("h_1",), ())
    """

    name: ClassVar[str] = "split_stages"
    leaves: ClassVar[Level] = Level.TRACED

    def apply(self, program: Program, plan: Plan | None) -> Program:
        assert plan is not None
        layers = len(program.layer_calls)
        if wrong := _wrong(plan.pipeline.stages, layers):
            raise PlanError(
                f"stages {[list(stage) for stage in plan.pipeline.stages]} do not hold each of the {layers} layers of "
                f"{program.name} exactly once, in order: {wrong}; give {len(plan.pipeline.stages)} consecutive ranges "
                f"[start, stop] from 0 to {layers}"
            )
        program = replace(program, stages=tuple(Stage(start, stop) for start, stop in plan.pipeline.stages))
        crossing = [_crossing(program, stage) for stage in range(len(plan.pipeline.stages) - 1)]
        bounds = zip(program.stages, [(), *crossing], [*crossing, ()], strict=True)
        stages = tuple(replace(stage, receives=before, sends=after) for stage, before, after in bounds)
        return replace(program, stages=stages)


def _wrong(stages: Sequence[tuple[int, int]], layers: int) -> str:
    """The first thing that is wrong with the ranges of layers; "" where they are right."""
    if not layers:  # all prologue and epilogue
        return "" if len(stages) == 1 else "there are no layers to spread"
    expected = 0
    for number, (start, stop) in enumerate(stages):
        if start != expected:
            missing, twice = list(range(expected, start)), list(range(start, expected))
            what = f"layers {missing} are in none" if missing else f"layers {twice} are in two"
            return f"stage {number} starts at layer {start}, where {expected} is next ({what})"
        if stop <= start:
            return f"stage {number} has no layers"
        expected = stop
    return "" if expected == layers else f"the last one stops at {expected}"


def _crossing(program: Program, stage: int) -> tuple[str, ...]:
    """Values made in stages up to `stage` and read after it, in the order they are made."""
    made = [
        value
        for call in program.calls
        if call.block != TABLES and program.stage_of_call(call).start <= stage
        for value in call.outputs
    ]
    read = {
        value
        for call in program.calls
        if call.block != TABLES and program.stage_of_call(call).start > stage
        for value in call.inputs
    }
    return tuple(value for value in made if value in read)
