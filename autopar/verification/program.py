"""`verify`: the emitted program against the original, trained side by side in fp64 on CPU processes.

The original trains here on the whole global batch; a child process forks the ranks of the program, which
compare loss, every gradient, norms and weights with it on every rank. A model that is too large is shrunk:
the same layer classes and plan structure, fewer and narrower layers, a mesh of at most 8 processes. Dropout is
off on both sides: its masks are drawn per rank.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..compile.compiler import compile_program, prepare
from ..emit.emission import Predicted
from ..emit.project import pack_opaque, save_opaque
from ..emit.source import model_source
from ..errors import PlanError
from ..ir.graph import Program
from ..plan.plan import Plan
from ..progress import progress
from ..request import Job
from ..rules.random import draws
from ..trace.copies import copied
from ..trace.huggingface import without_cache
from ..trace.initialise import tensors_of
from ..trace.moe import written_experts
from ..trace.opaque import opaque_modules
from .parity import Parity, train_original
from .ranks import Task, relative, run_task, steps_done
from .samples import inputs_of, random_batch
from .shrink import small_enough

aten = torch.ops.aten
DROPOUT_ARGUMENT: dict[Any, int] = {aten.dropout.default: 1, aten.scaled_dot_product_attention.default: 4}


def verify_plan(job: Job, plan: Plan, steps: int) -> Parity:
    """Train original and program for `steps` steps; raises PlanError where the model cannot be run here."""
    model, plan, note = small_enough(job, plan)
    # Not compiled: on CPUs the C++ compiler would take minutes.
    plan = plan.changed(precision="fp64", compile=False, reduce_dtype=None)
    model = copied(model).double().train()
    program, dropped = without_dropout(prepare(model, _raised(job.inputs), "fp64", job.batch_norm))
    drawing = any(draws(node.target) for _, node in program.each_op())
    notes = [note] * bool(note) + ["dropout set to 0 on both sides"] * dropped
    opaque = pack_opaque(opaque_modules(program, model))
    source = model_source(compile_program(program, plan), plan, Predicted(), opaque=opaque)
    batches = [
        random_batch(inputs_of(program), plan.batch.global_batch, plan.batch.tokens, seed) for seed in range(steps)
    ]
    weights, reference = train_reference(model, batches, constants_of(job), plan, drawing)
    processes = plan.mesh.world_size
    with (
        tempfile.TemporaryDirectory(prefix="autopar-verify-") as folder,
        progress(f"training the program on {processes} processes", steps, lambda: steps_done(Path(folder))),
    ):
        (Path(folder) / "model.py").write_text(source)
        save_opaque(Path(folder), opaque)
        reports = run_task(Task(batches, weights, reference, draws=drawing), Path(folder))
    notes += ["every sample draws the same random numbers on both sides"] * drawing
    return Parity(**_largest(reports, reference), steps=steps, processes=processes, note=" · ".join(notes))


def _raised(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs in fp64, as the model's parameters are."""
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def train_reference(
    model: nn.Module,
    batches: Sequence[Mapping[str, Tensor]],
    constants: Mapping[str, Any],
    plan: Plan,
    drawing: bool = False,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights that a model begins with, and what training it gives; PlanError where its loss is no number."""
    weights = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    with progress("training the original", len(batches)) as so_far, written_experts(model), without_cache(model):
        reference = train_original(model, so_far.over(batches), constants, _optimizer(model, plan), drawing)
    if not all(map(math.isfinite, reference["losses"])):
        raise PlanError(f"the model's own losses are {reference['losses']}: there is nothing to compare with")
    return weights, reference


def constants_of(job: Job) -> dict[str, Any]:
    """The inputs that are no tensors."""
    return {name: value for name, value in job.inputs.items() if not isinstance(value, Tensor)}


def _largest(reports: Sequence[Mapping[str, Any]], reference: Mapping[str, Any]) -> dict[str, Any]:
    """The largest errors over the ranks; PlanError where no rank has a tensor of the reference."""
    largest: dict[str, Any] = {
        what: max(max(relative(report[all_steps], reference[all_steps])) for report in reports)
        for what, all_steps in (("loss", "losses"), ("norm", "norms"))
    }
    for what in ("gradients", "weights"):
        pairs = [pair for report in reports for pair in report[what].items()]
        if missing := sorted(reference[what].keys() - {name for name, _ in pairs}):
            raise PlanError(f"no rank of the program has the {what} of {', '.join(missing)}")
        largest[f"worst_{what[:-1]}"], largest[what] = max(pairs, key=lambda pair: float(pair[1]))
    return largest


def without_dropout(program: Program) -> tuple[Program, bool]:
    """The same ops with every dropout probability 0, and whether one was not."""
    program, dropped = program.copy_blocks(), False
    for _, node in program.each_op():
        place = DROPOUT_ARGUMENT.get(node.target)
        if place is not None and len(node.args) > place:
            dropped |= bool(node.args[place])
            node.update_arg(place, 0.0)
    return program, dropped


def _optimizer(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    def own(name: str) -> Mapping[str, Any]:
        return next((options for names, options in plan.optimizer.groups if name in names), {})

    groups = [{"params": parameter, **own(name)} for name, parameter in model.named_parameters()]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, plan.optimizer.name)(groups, **plan.optimizer.kwargs)
    return optimizer
