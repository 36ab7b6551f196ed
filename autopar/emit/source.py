"""Program + plan → the text of model.py: one class per layer class, one Model for all ranks; and back to a module."""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping
from types import ModuleType

from torch import fx

from ..ir.graph import COUNT, B, Block, Program, Role, info
from ..plan.plan import Plan
from ..plan.recompute import summary
from ..runtime.opaque import OpaqueModule
from .body import Body
from .classes import layer_class, model_class
from .code import Suite, function, globals_read, text_of
from .constants import constants
from .emission import Emission, Predicted, sizes_in
from .names import argument_name, check_attributes, imports
from .recomputed import recomputed_layers
from .text import docstring

_TYPES = """\
on tp      Shard(d): each rank has a slice of dim d; Replicate: each has all of it; Partial: each has a
           summand of it. local(w) is this rank's part of a parameter; summed(w) too, for a replicated
           parameter that each rank uses for other work: its gradient is summed over tp."""


_CONTEXT = """\
on cp      s is the length of this rank's part of the sequence, 1/{cp} of it: ids and labels come whole, and
           positions are those of the whole. Parameters are whole; their gradients are summed as over dp."""
_ZIGZAG = """
           Of {chunks} chunks of the sequence rank r has the chunks r and {last} - r, for equal work."""


def model_source(program: Program, plan: Plan, predicted: Predicted, header: str = "", opaque: bytes = b"") -> str:
    """The text of model.py; `header` (the plan table) goes into its docstring, the hash of `opaque` before its use.

    PlanError where an attribute of the model has a name that the emitted classes use themselves.
    """
    check_attributes(program, recomputed_layers(program))
    e = Emission(program, plan, predicted, opaque)
    names = dict.fromkeys(c.block for c in program.layer_calls if not program.is_between(c.block))
    classes = [*(layer_class(e, e.program.blocks[name]) for name in names), model_class(e)]
    code = "\n\n\n".join([*e.functions.values(), *(text_of([part]) for part in (*classes, *_count_targets(e)))])
    settings = text_of(constants(e, "PATHS" in globals_read(code)))
    lines = imports(globals_read(f"{settings}\n{code}"))
    parts = [_docstring(program, plan, predicted, header), "\n".join(lines), settings]
    return "\n\n".join(part.strip("\n") for part in parts) + f"\n\n\n{code}\n"


def _count_targets(e: Emission) -> list[Suite]:
    """The function count_targets, where the loss is divided by something of the global batch."""
    if COUNT not in e.program.blocks:
        return []
    block = e.program.blocks[COUNT]
    placeholders = _inputs_of_count(e, block)
    inputs = [info(n).ref for n in placeholders]
    names = {n: argument_name(info(n).ref) for n in placeholders}
    counts = {n: f"count_{i}" if i > 1 else "count" for i, n in enumerate(block.results, 1)}
    body = Body(e, block, names, fixed=counts).returned()
    several = "What these samples add to _count, _count_2, …"
    doc = [f'"""{several if len(counts) > 1 else "The number of terms in the loss of these samples."}"""']
    if inputs == [*names.values()]:
        return [function("count_targets", inputs, body, doc)]
    # An input called `F` would hide the module of that name.
    outer = function("count_targets", inputs, [f"return _counted({', '.join(inputs)})"], doc)
    return [outer, function("_counted", [*names.values()], body)]


def _inputs_of_count(e: Emission, block: Block) -> list[fx.Node]:
    """The inputs that the counts read, and those that tell the sizes and device of targets that forward makes."""
    inputs = block.placeholders(Role.INPUT)
    others = [node for other in e.program.blocks.values() for node in other.placeholders(Role.INPUT)]
    for size in sorted(sizes_in(block.ops) or {B}, key=str):
        if not any(size in info(node).shape for node in inputs):
            inputs += [node for node in others if size in info(node).shape][:1]
    return inputs


def load_source(source: str, name: str = "model", opaque: Mapping[str, OpaqueModule] | None = None) -> ModuleType:
    """Execute the text of model.py; its `runtime` is autopar.runtime, and tracebacks show its lines.

    opaque: the modules that it keeps whole, which a saved program has beside it.
    """
    text = re.sub(r"^from runtime\.", "from autopar.runtime.", source, flags=re.MULTILINE)
    filename = f"<{name}>/model.py"  # no folder: its weights are given, not read
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    module = ModuleType(name)
    module.__file__ = filename
    exec(compile(text, filename, "exec"), module.__dict__)  # our own text, which this process has just written
    if opaque:
        module.OPAQUE.modules = opaque
    return module


# --------------------------------------------------------------------------------
# The docstring: model, plan, what is predicted of it, how to run it, the words used below


def _docstring(program: Program, plan: Plan, predicted: Predicted, table: str) -> str:
    """The docstring with its quotes; `table` is the plan table, or nothing."""
    world = plan.mesh.world_size
    parts = [
        f"{program.name}, distributed by autopar over {world} {_units(predicted.unit, world)}.",
        "\n".join(
            [
                f"plan       {_plan_text(plan)}",
                *([f"predicted  {text}"] if (text := _predicted(predicted)) else []),
                f"run        torchrun --nproc-per-node {world} -- train.py (several nodes: launch.sh)",
                *([_TYPES] if plan.mesh.tp > 1 else []),
                *([_on_cp(program, plan)] if plan.mesh.cp > 1 else []),
            ]
        ),
    ]
    parts += [table.strip()] if table.strip() else []
    return "\n".join(docstring(parts[0], "\n\n".join(parts[1:]).split("\n")))


def _on_cp(program: Program, plan: Plan) -> str:
    cp = plan.mesh.cp
    return _CONTEXT.format(cp=cp) + (_ZIGZAG.format(chunks=2 * cp, last=2 * cp - 1) if program.zigzag else "")


def _plan_text(plan: Plan) -> str:
    """pp2·tp2 (megatron), zero 0, 4 × 2 samples by 1f1b, no recompute, bf16, AdamW."""
    batch, schedule, compute = plan.batch, plan.pipeline.schedule, plan.compute
    names = [s.name for s in (plan.context, plan.solution) if s.ranks > 1 and s.name]
    layout = f" ({', '.join(names)})" if names else ""
    by = f" by {schedule}" if schedule != "none" else ""
    by += f" ({plan.virtual_stages} stages a rank)" if plan.virtual_stages > 1 else ""
    recomputed, chunks = summary(plan.activations.recompute, plan.pipeline.stages[-1][1]), plan.activations.loss_chunks
    return ", ".join(
        (
            f"{plan.mesh}{layout}",
            f"zero {plan.sharding.text()}",
            f"micro-batch {batch.micro_batch} × {plan.accumulation}{by}",
            *([f"{batch.tokens:,} tokens padded to {batch.sequence:,}"] if batch.padded else []),
            f"recompute {'all layers' if recomputed == 'full' else recomputed}",
            *([f"loss in {chunks} slices"] if chunks > 1 else []),
            compute.text(),
            *(["compiled layers"] if compute.compile else []),
            plan.optimizer.name,
        )
    )


def _predicted(predicted: Predicted) -> str:
    parts = []
    if predicted.step_s is not None:
        parts.append(f"{predicted.step_s:.3g} s a step")
    if predicted.mfu is not None:
        parts.append(f"MFU {predicted.mfu:.1%}")
    if predicted.peak_bytes is not None:
        unit, unit_bytes = ("GiB", 2**30) if predicted.peak_bytes >= 2**29 else ("MiB", 2**20)
        parts.append(f"{predicted.peak_bytes / unit_bytes:.3g} {unit} on the fullest {predicted.unit}")
    return ", ".join(parts)


def _units(unit: str, count: int) -> str:
    """ "GPU", "GPUs", "process", "processes"."""
    return unit if count == 1 else f"{unit}es" if unit.endswith("s") else f"{unit}s"
