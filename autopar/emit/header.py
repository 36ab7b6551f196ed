"""The docstring of model.py: model, plan, what was predicted, how to run it, the words used below."""

from __future__ import annotations

from ..ir.graph import Program
from ..plan.plan import Plan
from ..plan.recompute import summary
from .emission import Predicted
from .text import docstring as docstring_lines

_TYPES = """\
on tp      Shard(d): each rank has a slice of dim d; Replicate: each has all of it; Partial: each has a
           summand of it. local(w) is this rank's part of a parameter; summed(w) too, for a replicated
           parameter that each rank uses for other work: its gradient is summed over tp."""


_CONTEXT = """\
on cp      s is the length of this rank's part of the sequence, 1/{cp} of it: ids and labels come whole, and
           positions are those of the whole. Parameters are whole; their gradients are summed as over dp."""
_ZIGZAG = """
           Of {chunks} chunks of the sequence rank r has the chunks r and {last} - r, for equal work."""


def docstring(program: Program, plan: Plan, predicted: Predicted, table: str) -> str:
    """The docstring with its quotes; `table` is the plan table, or nothing."""
    world = plan.mesh.world_size
    parts = [
        f"{program.name}, distributed by autopar over {world} {_units(predicted.unit, world)}.",
        "\n".join(
            [
                f"plan       {plan_text(plan)}",
                *([f"predicted  {text}"] if (text := _predicted(predicted)) else []),
                f"run        torchrun --nproc-per-node {world} -- train.py (several nodes: launch.sh)",
                *([_TYPES] if plan.mesh.tp > 1 else []),
                *([_on_cp(program, plan)] if plan.mesh.cp > 1 else []),
            ]
        ),
    ]
    parts += [table.strip()] if table.strip() else []
    return "\n".join(docstring_lines(parts[0], "\n\n".join(parts[1:]).split("\n")))


def _on_cp(program: Program, plan: Plan) -> str:
    cp = plan.mesh.cp
    return _CONTEXT.format(cp=cp) + (_ZIGZAG.format(chunks=2 * cp, last=2 * cp - 1) if program.zigzag else "")


def plan_text(plan: Plan) -> str:
    """pp2·tp2 (megatron), zero 0, 4 × 2 samples by 1f1b, no recompute, bf16, AdamW."""
    batch, schedule, compute = plan.batch, plan.pipeline.schedule, plan.compute
    names = [s.name for s in (plan.context, plan.solution) if s.ranks > 1 and s.name]
    layout = f" ({', '.join(names)})" if names else ""
    by = f" by {schedule}" if schedule != "none" else ""
    by += f" ({plan.virtual_stages} stages a rank)" if plan.virtual_stages > 1 else ""
    again, chunks = summary(plan.activations.recompute, plan.pipeline.stages[-1][1]), plan.activations.loss_chunks
    return ", ".join(
        (
            f"{plan.mesh}{layout}",
            f"zero {plan.sharding.text()}",
            f"micro-batch {batch.micro_batch} × {plan.accumulation}{by}",
            *([f"{batch.tokens:,} tokens padded to {batch.sequence:,}"] if batch.padded else []),
            f"recompute {'all layers' if again == 'full' else again}",
            *([f"loss in {chunks} slices"] if chunks > 1 else []),
            compute.precision + (f" (gradients summed in {compute.reduce_dtype})" if compute.reduce_dtype else ""),
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
