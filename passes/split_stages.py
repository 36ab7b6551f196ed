"""Give each pipeline stage its layers, and find what passes between stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from autopar.errors import PlanError
from autopar.ir.graph import TABLES, Program, Stage
from autopar.plan import Plan


@dataclass(frozen=True)
class SplitStages:
    """Layers → stages. The prologue belongs to the first stage, the epilogue to the last, tables to all.

    Requires: a program of layers. Ensures: every layer is in exactly one stage; a value used several stages
    later is sent on by the stages between.

        stages ((0, 2), (2, 4))   |   Stage(0, 2, (), ("h_1",)), Stage(2, 4, ("h_1",), ())
    """

    name: ClassVar[str] = "split_stages"

    def apply(self, program: Program, plan: Plan | None) -> Program:
        assert plan is not None
        layers = len(program.layer_calls)
        ends = [0, *(stop for _, stop in plan.stages)]
        if [start for start, _ in plan.stages] != ends[:-1] or ends[-1] != layers:
            raise PlanError(
                f"stages {list(plan.stages)} do not hold each of the {layers} layers of {program.name} exactly once: "
                f"give {plan.mesh.pp} consecutive ranges from 0 to {layers}"
            )
        program = replace(program, stages=tuple(Stage(start, stop) for start, stop in plan.stages))
        crossing = [_crossing(program, stage) for stage in range(len(plan.stages) - 1)]
        bounds = zip(program.stages, [(), *crossing], [*crossing, ()], strict=True)
        stages = tuple(replace(stage, receives=before, sends=after) for stage, before, after in bounds)
        return replace(program, stages=stages)


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
