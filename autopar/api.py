"""The public interface, and the whole flow on one screen: model → program → costs → search → plan → source."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import sympy
import torch
from torch import nn

from .compile.cache import remembered
from .compile.compiler import compile_program, prepare
from .compile.notes import explain_notes, table_notes, warn_unknown
from .compile.solutions import Solutions, models_of, solve_layouts, with_placements
from .cost_models.hardware import Cluster
from .cost_models.step_time import Estimate
from .emit.emission import Predicted
from .emit.project import check_folder, pack_opaque, save_project, save_tensors
from .emit.source import load_source, model_source
from .emit.text import fenced
from .errors import PlanError
from .ir.graph import B, Program, S
from .ir.identifiers import printable
from .plan.options import PINS, check, check_names
from .plan.plan import Plan, asked_length
from .progress import progress
from .request import Job, OptimizerLike, make_job
from .search.explain import explain, plan_table
from .search.explain import why_not as why_slower
from .search.job import check_choices, check_layers, cp_sizes, illegal_sizes, search_job, tp_sizes
from .search.layouts import LAYOUTS
from .search.pins import Pins
from .search.search import SearchResult
from .trace.initialise import Weights, weights_of
from .trace.opaque import opaque_modules
from .trace.positions import check_positions
from .trace.watch import layers_watched
from .verification.folder import keep_original
from .verification.padding import check_padding
from .verification.parity import Parity
from .verification.program import verify_plan


def parallelize(
    model: nn.Module | Callable[[], nn.Module],
    gpus: int | Cluster | None = None,
    *,
    gpu: str | None = None,
    memory: str | float | None = None,
    inputs: Mapping[str, Any] | None = None,
    loss: Callable[[Any, Mapping[str, Any]], torch.Tensor] | None = None,
    sequence: int | None = None,
    pad_to_multiple_of: int | None = None,
    global_batch: int | None = None,
    optimizer: OptimizerLike = None,
    precision: str | None = None,
    compile: bool = False,
    batch_norm: str = "refuse",
    cache: str | bool | None = None,
    **pins: Any,
) -> Parallelized:
    """The fastest plan for training `model` on `gpus` GPUs within `memory` bytes each, and its program.

    model: a module with real or meta weights, or a function that builds one (built on meta).
    inputs: example keyword inputs with labels, batch on dim 0; not needed for Hugging Face models. Floating ones
    (images) are cast to the compute dtype, here and in training.
    loss: (outputs, batch) → scalar, where forward returns no loss. sequence: tokens; global_batch: samples.
    pad_to_multiple_of: the program pads samples of `sequence` tokens to the next multiple, and computes the same loss.
    compile=True: the layers run under torch.compile.
    batch_norm="synchronise": its statistics are those of all replicas' samples, in one micro-batch; else refused.
    cache: traced programs are kept in ~/.cache/autopar: of unmodified Hugging Face models always, of others under a
    name that you change whenever the model's code, its loss or values that forward reads change; False: never.
    pins fix choices of the search, forbid={"zero": [3]} bans some:
    {pins}
    Raises PlanError (a ValueError) naming what is wrong, where, and the way out.
    """
    chosen = make_pins(pins)
    together: dict[str, Any] = {
        "gpu": gpu, "global_batch": global_batch, "pad_to_multiple_of": pad_to_multiple_of, "precision": precision,
        "compile": compile,
    }  # fmt: skip
    check_choices(chosen, gpus, sequence=sequence, **together)
    job = make_job(
        model, gpus, gpu=gpu, memory=memory, inputs=inputs, loss=loss, sequence=sequence,
        global_batch=global_batch, optimizer=optimizer, precision=precision, batch_norm=batch_norm, compile=compile,
        pad_to_multiple_of=pad_to_multiple_of,
    )  # fmt: skip
    check_choices(chosen, job.cluster, sequence=job.batch.tokens, **together)
    check_positions(job.model, job.inputs, job.batch.sequence, asked_length(job.batch))
    settings = (job.compute.precision, job.batch_norm)
    program = remembered(lambda: _traced(job), job.model, job.inputs, settings, cache)
    check_layers(program, job, chosen)
    illegal = illegal_sizes(program, job, chosen)
    if job.batch.padded:
        check_padding(job, program, job.batch.tokens, job.batch.sequence)
    warn_unknown(program, job.batch.sequence)
    layouts = [layout for layout in LAYOUTS if _allowed(chosen, layout.name)]
    cps, tps = cp_sizes(program, job, chosen), [tp for tp in tp_sizes(job, chosen) if f"tp={tp}" not in illegal]
    solutions, unsolved = solve_layouts(program, job, cps, tps, layouts, chosen)
    with progress("pricing the placements"):
        models = models_of(job, program, solutions, chosen)
    result = search_job(job, program, models, chosen, illegal | unsolved)
    return Parallelized(job, program, solutions, result)


def _traced(job: Job) -> Program:
    with progress(f"tracing {job.name}") as so_far, layers_watched(type(job.model), so_far.at_layer):
        return prepare(job.model, job.inputs, job.compute.precision, job.batch_norm, dump_folder())


def estimate(model: nn.Module | Callable[[], nn.Module], gpus: int | Cluster | None = None, **kwargs: Any) -> Estimate:
    """The prediction alone, with the arguments of `parallelize`: pin every choice to price one plan."""
    return parallelize(model, gpus, **kwargs).estimate


@dataclass(frozen=True)
class Parallelized:
    """A plan with its program. `print` shows the plan table; `explain`, `compare`, `save`, `build`, `verify`."""

    job: Job
    program: Program
    solutions: Solutions
    result: SearchResult

    @cached_property
    def plan(self) -> Plan:
        return with_placements(self.result.chosen.plan, self.solutions)

    @property
    def estimate(self) -> Estimate:
        return self.result.chosen.estimate

    @cached_property
    def weights(self) -> Weights:
        return weights_of(self.job.model, self.job.factory)

    def __str__(self) -> str:
        tied = set(self.program.tied)
        sizes = (sympy.Mul(*t.shape) for name, t in self.program.parameters.items() if name not in tied)
        table = plan_table(self.result, self.job.name, int(sum(sizes)))
        notes = table_notes(self.job, self.program)
        return printable(table + "".join(f"\n {note}" for note in notes))

    def explain(self) -> str:
        """Time and memory of each stage, and what the runners-up lose."""
        notes = explain_notes(self.job, self.program, self.plan.context)
        return printable("\n".join([explain(self.result), *notes]))

    def compare(self, **pins: Any) -> str:
        """What if: the best plan with these pins beside the chosen one."""
        chosen = make_pins(pins)
        check_layers(self.program, self.job, chosen)
        illegal = illegal_sizes(self.program, self.job, chosen)
        solutions = {key: s for key, s in self.solutions.items() if _allowed(chosen, key.layout)}
        models = models_of(self.job, self.program, solutions, chosen)
        other = search_job(self.job, self.program, models, chosen, illegal)
        both = replace(self.result, best=(self.result.chosen, other.chosen))
        return f"{replace(self, result=both)}\n{why_slower(other.chosen, self.result.chosen)}"

    def source(self, plan: Plan | None = None) -> str:
        """The text of model.py."""
        plan = plan or self.plan
        return self._source(plan, b"")

    def _source(self, plan: Plan, opaque: bytes) -> str:
        batch = plan.batch
        if batch.padded and (batch.tokens, batch.sequence) != (self.job.batch.tokens, self.job.batch.sequence):
            check_padding(self.job, self.program, batch.tokens, batch.sequence)
        return model_source(
            compile_program(self.program, plan, dump_folder()), plan, self._predicted(plan), str(self), opaque
        )

    def save(self, folder: str | Path, plan: Plan | None = None, *, overwrite: bool | Collection[str] = False) -> Path:
        """Write the program: model.py, train.py, runtime/, plan.yaml, weights and launch files.

        PlanError where the folder has files that were edited by hand; overwrite=True overwrites them.
        """
        folder, plan = Path(folder), plan or self.plan
        check_folder(folder, overwrite)
        opaque = pack_opaque(opaque_modules(self.program, self.job.model))
        source = self._source(plan, opaque)
        if self.weights.missing:
            names = ", ".join(self.weights.missing[:3])
            print(f"{len(self.weights.missing)} parameters ({names}, …) have no values: train with --init DIR")
        save_project(
            folder,
            source,
            plan,
            self.weights,
            name=self.job.name,
            summary=f"{fenced(str(self))}\n\n{fenced(self.explain())}",
            gpus_per_node=self.job.cluster.hardware.gpus_per_node,
            opaque=opaque,
        )
        keep_original(folder, self.job, self.program)
        return folder

    def load(self) -> ModuleType:
        """The emitted model.py as a module of this process."""
        return load_source(self.source(), opaque=opaque_modules(self.program, self.job.model))

    def build(self, **options: Any) -> Any:
        """The Trainer of this rank, when already under torchrun: `.model` is its module, `.step(batch)` trains.

        options: seed (of a recorded initialisation and of dropout), lr, clip, device.
        """
        from .runtime.trainer import Trainer  # only here: planning needs no process group

        if self.weights.missing:
            raise PlanError(f"{len(self.weights.missing)} parameters have no values: build the model on the CPU")
        program = self.load()
        if not self.weights.recipes:
            return Trainer(program, dict(self.weights.values), **options)
        with TemporaryDirectory(prefix="autopar-build-") as folder:
            save_tensors(Path(folder, "weights.pt"), self.weights.values)
            Path(folder, "init.json").write_text(json.dumps(dict(self.weights.recipes)))
            program.__file__ = f"{folder}/model.py"  # beside which the trainer reads them
            return Trainer(program, **options)

    def verify(self, steps: int = 5) -> Parity:
        """Train the emitted program and the original for a few steps in fp64 on CPU processes, and compare."""
        check({"steps": steps})
        return verify_plan(self.job, self.plan, steps)

    def _predicted(self, plan: Plan) -> Predicted:
        unit = self.job.cluster.unit
        if plan.mesh != self.plan.mesh:
            return Predicted(unit=unit)
        batch = plan.batch
        values = {B: batch.micro_batch, S: batch.sequence // plan.mesh.cp}  # costs are those of a rank of cp
        micro_batches = plan.accumulation * plan.mesh.dp
        flops = float(self.result.chosen.model.unsharded_flops.subs(values)) * micro_batches
        estimate = self.estimate
        peak = self.job.cluster.hardware.peak(plan.compute.precision)
        if plan != self.plan:
            return Predicted(flops_per_step=3 * flops, peak_flops=peak, unit=unit)
        return Predicted(estimate.step_time_s, 3 * flops, peak, estimate.peak_bytes, estimate.mfu, unit)


def dump_folder() -> Path | None:
    """Where the program is written after each pass, if anywhere."""
    folder = os.environ.get("AUTOPAR_DUMP")
    return Path(folder) if folder else None


def make_pins(pins: Mapping[str, Any]) -> Pins:
    """The pins by name; PlanError for other names, with the nearest."""
    if unknown := set(pins) - {*PINS, "forbid"}:
        options = (name for name in inspect.signature(parallelize).parameters if name not in ("model", "pins"))
        check_names(unknown, [*PINS, "forbid", *options], "no such option; there are")
    return Pins(**pins)


def _allowed(pins: Pins, layout: str) -> bool:
    """Whether the pins leave a layout of tp."""
    return pins.sequence_parallel is None or layout == ("megatron-sp" if pins.sequence_parallel else "megatron")


_PINNED = "\n    ".join(f"    {name}: {option.text}" for name, option in PINS.items())
parallelize.__doc__ = str(parallelize.__doc__).replace("    {pins}", f"    {_PINNED}")
