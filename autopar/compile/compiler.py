"""The compiler: a module → a prepared program; with a plan → a distributed program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import PlanError
from ..ir.graph import B, Program, S
from ..ir.lengths import check_multiple
from ..ir.reads import read_elsewhere
from ..ir.text import program_text
from ..passes import CONTEXT, HEADS, PASSES, PREPARE, Pass
from ..plan.deadlock import deadlock, posts
from ..plan.plan import Plan, Solution
from ..rules import Axis, DataAxis, TensorAxis
from ..rules.attention import context_axis
from ..rules.padding import paddings_of
from ..rules.spread import data_types
from ..rules.verify import verify
from ..runtime.choices import Batch, Mesh
from ..trace.export import trace
from ..trace.huggingface import traceable
from ..trace.layers import class_names, split_layers
from ..trace.repeats import NotRepeatedError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def prepare(
    model: nn.Module, inputs: Mapping[str, Any], precision: str, batch_norm: str = "refuse", dump: Path | None = None
) -> Program:
    """Trace a model in the compute dtype, run PREPARE, and cut it into layers."""
    try:
        return _layers(model, inputs, precision, batch_norm, True, dump)
    except NotRepeatedError:
        return _layers(model, inputs, precision, batch_norm, False, dump)


def _layers(
    model: nn.Module,
    inputs: Mapping[str, Any],
    precision: str,
    batch_norm: str,
    fold: bool,
    dump: Path | None = None,
) -> Program:
    with traceable(model, inputs):
        program = trace(model, inputs, DTYPES[precision], fold, batch_norm)
    return split_layers(run(PREPARE, program, dump=dump), class_names(model))


def compile_program(program: Program, plan: Plan, dump: Path | None = None) -> Program:
    """Run CONTEXT and PASSES in order."""
    if coupling := data_types(program).coupling:
        coupling.check(plan)
    if fixed := program.fixed_length:
        fixed.check(f"sequence={plan.batch.sequence}", plan.batch.sequence)
        fixed.check_uncut(f"cp={plan.mesh.cp}", plan.mesh.cp)
    check_multiple(program.sequence_multiple, f"sequence={plan.batch.sequence}", plan.batch.sequence, plan.batch.tokens)
    if plan.batch.padded:
        program = replace(program, padding=paddings_of(program))
    program = cut_sequence(program, plan, dump)
    values = {B: plan.batch.micro_batch, S: plan.batch.sequence // plan.mesh.cp}
    axes: list[Axis] = [TensorAxis(plan.mesh.tp, values, sequence=True)]
    axes += [DataAxis(plan.mesh.dp)] if plan.mesh.dp > 1 else []
    program = run(PASSES, program, plan, axes, dump)
    _check_units(program, plan)
    _check_transfers(program, plan)
    return program


def sequence_only(program: Program, cp: int, tp: int, batch: Batch, context: str) -> Plan:
    """A plan that does nothing but cut sequences over cp, by the layout `context`."""
    stages, over_cp = ((0, len(program.layer_calls)),), Solution(cp, {}, context)
    given: dict[str, Any] = {"padded_from": batch.padded_from, "context": over_cp}
    return Plan.of(Mesh(cp=cp, tp=tp), 1, 1, batch.sequence, stages, **given)


def with_heads(program: Program, plan: Plan) -> Program:
    """The program on which the placements over cp are solved: with as many K/V heads as the plan's layout wants."""
    return run(HEADS, program, plan)


def cut_sequence(program: Program, plan: Plan, dump: Path | None = None) -> Program:
    """The program of one rank of cp, on which the placements over tp are solved."""
    if plan.mesh.cp == 1:
        return program
    values = {B: plan.batch.micro_batch, S: plan.batch.sequence}
    axis = context_axis(program, plan.mesh.cp, values, plan.context.name, plan.mesh.tp)
    return run(CONTEXT, program, plan, [axis], dump)


def run(
    passes: Iterable[Pass],
    program: Program,
    plan: Plan | None = None,
    axes: Sequence[Axis] = (),
    dump: Path | None = None,
) -> Program:
    """Each pass in turn, and the checks of what it leaves; with the folder `dump` each result is written there."""
    for step in passes:
        before, program = program, step.apply(program, plan)
        verify(program, step.leaves, axes)
        if dump is not None:
            _dump(dump, step, before, program)
    return program


def _dump(folder: Path, step: Pass, before: Program, after: Program) -> None:
    counts = [Counter(str(node.target) for _, node in program.each_op()) for program in (before, after)]
    added, removed = counts[1] - counts[0], counts[0] - counts[1]
    difference = [f"+{n} {op}" for op, n in added.items()] + [f"-{n} {op}" for op, n in removed.items()]
    text = f"# after {step.name}: {', '.join(difference) or 'ops unchanged'}\n\n{program_text(after)}"
    folder.mkdir(parents=True, exist_ok=True)
    number = 1 + (*PREPARE, *CONTEXT, *PASSES).index(step)
    (folder / f"{number:02d}_{step.name}.txt").write_text(text)


def _check_units(program: Program, plan: Plan) -> None:
    """PlanError where a layer's parameter is read where it is not: on another stage, or in shards."""
    for name, layer, reader in read_elsewhere(program):
        if set(program.stage_of_call(layer)) != set(program.stage_of_call(reader)):
            raise PlanError(
                f"pp={plan.mesh.pp}: {name} is read outside its layer, on a stage that has it not: use pp=1"
            )
        if plan.sharding.zero == 3:
            raise PlanError(
                f"zero=3: {name} is read outside its layer, where ZeRO-3 has only shards: use zero=0, 1 or 2"
            )


def _check_transfers(program: Program, plan: Plan) -> None:
    """PlanError where the stages would wait for each other for ever: all sends and receives of a step are simulated."""
    links = [(k, k + 1) for k, stage in enumerate(program.stages[1:]) if stage.receives]
    for k, (before, after) in enumerate(pairwise(program.stages)):
        assert before.sends == after.receives, (
            f"stage {k} sends {before.sends}, and stage {k + 1} wants {after.receives}"
        )
    pp = plan.mesh.pp
    stuck = deadlock(posts(plan.pipeline.schedule, pp, plan.accumulation, plan.virtual_stages, links), pp)
    if stuck:
        raise PlanError(f"schedule={plan.pipeline.schedule!r} with stages {plan.pipeline.stages} cannot end: {stuck}")
