"""What the commands of the command line do, by name."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .api import Parallelized, make_pins, parallelize
from .compile.solutions import with_placements
from .emit.project import check_folder
from .errors import PlanError
from .given_plan import with_given
from .plan.options import JOB, OPTIONS, PINS
from .plan.plan import Plan
from .search.explain import why_not
from .search.job import check_choices
from .search.search import Candidate
from .trace.named import named_function, named_model
from .verification.folder import verify_folder

_OF_THE_PLAN = tuple(name for name in (*JOB, *PINS) if name not in ("gpus", "gpus_per_node", "memory", "batch_norm"))
_LAYOUTS = {"megatron": False, "megatron-sp": True}


def plan(args: argparse.Namespace) -> int:
    if args.save and (args.save.is_dir() or not args.save.parent.is_dir()):
        raise PlanError(f"--save {args.save}: name a file in a folder that exists")
    result = _parallelized(args)
    if args.save:
        result.plan.save(args.save)
    if args.json:
        print(json.dumps(_machine_readable(result), indent=1))
        return 0
    print(result)
    if args.explain:
        print(f"\n{result.explain()}")
    return 0


def emit(args: argparse.Namespace) -> int:
    read_from = args.plan and args.plan.absolute() == (args.out / "plan.yaml").absolute()
    overwrite = True if args.force else ("plan.yaml",) if read_from else ()
    check_folder(args.out, overwrite)
    result = _of_plan(args, Plan.load(args.plan)) if args.plan else _parallelized(args)
    result.save(args.out, overwrite=overwrite)
    print(result)
    print(f"\nwrote {args.out}; train it with: autopar run {args.out} -- --steps 100")
    return 0


def run(args: argparse.Namespace) -> int:
    script, plan_file = args.folder / "train.py", args.folder / "plan.yaml"
    if not script.exists() or not plan_file.exists():
        raise PlanError(f"{args.folder} is no saved program (no train.py and plan.yaml): write one with autopar emit")
    processes = Plan.load(plan_file).mesh.world_size
    here = torch.cuda.device_count()
    if 0 < here < processes:
        raise PlanError(
            f"{args.folder} was planned for {processes} GPUs and this machine has {here}: start its launch.sh on each "
            f"node, or plan for --gpus {here}"
        )
    # A free port of its own; `--`, for torchrun takes --log for one of its options.
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "--", str(script)]
    with subprocess.Popen([sys.executable, *launch, *_after_dashes(args.arguments)]) as torchrun:
        try:
            return torchrun.wait()
        except KeyboardInterrupt:
            torchrun.wait()  # the terminal has interrupted it too, and it ends its processes
            raise


def verify(args: argparse.Namespace) -> int:
    if (Path(args.model) / "plan.yaml").exists():
        comparison = verify_folder(Path(args.model), args.original, args.steps)
        print(comparison)
        return 0 if comparison.same else 1
    if ":" not in args.model and os.sep in args.model and not Path(args.model).exists():
        raise PlanError(f"{args.model} does not exist: name a saved program, a model, module:function, or a config")
    parity = _parallelized(args).verify(args.steps)
    print(parity)
    return 0 if parity.holds else 1


def _after_dashes(arguments: list[str]) -> list[str]:
    return arguments[1:] if arguments[:1] == ["--"] else arguments


def _machine_readable(result: Parallelized) -> dict[str, Any]:
    """The chosen plan with its estimate, the runners-up with what they lose, and what was searched."""
    found = result.result

    def shown(candidate: Candidate) -> dict[str, Any]:
        plan = with_placements(candidate.plan, result.solutions)
        return {"plan": plan.to_dict(), "estimate": asdict(candidate.estimate)}

    others = [{**shown(other), "reason": why_not(other, found.chosen)} for other in found.best[1:]]
    return {
        "model": result.job.name,
        "cluster": {"gpus": found.cluster.gpus, "gpu": found.cluster.gpu},
        "budget_bytes": found.request.budget_bytes,
        **shown(found.chosen),
        "runners_up": others,
        "searched": found.searched,
        "do_not_fit": found.do_not_fit,
        "not_legal": list(found.not_legal),
        "notes": [*found.notes, *(f"default: {note}" for note in result.job.notes)],
    }


# --------------------------------------------------------------------------------
# From arguments to a plan


def _parallelized(args: argparse.Namespace) -> Parallelized:
    pins = {name: getattr(args, name) for name in PINS} | {"forbid": _forbidden(args.forbid)}
    # Here too, for a model takes its time to be imported and built.
    check_choices(
        make_pins(pins), args.gpus, gpu=args.gpu, global_batch=args.global_batch, sequence=args.sequence,
        pad_to_multiple_of=args.pad_to_multiple_of, precision=args.precision, compile=args.compile,
    )  # fmt: skip
    loss = _loss(args)
    model, inputs = named_model(args.model, args.inputs)
    return parallelize(
        model,
        args.gpus,
        gpu=args.gpu,
        memory=args.memory,
        inputs=inputs,
        loss=loss,
        sequence=args.sequence,
        pad_to_multiple_of=args.pad_to_multiple_of,
        global_batch=args.global_batch,
        precision=args.precision,
        optimizer=(args.optimizer or "AdamW", {} if args.lr is None else {"lr": args.lr}),
        batch_norm=args.batch_norm or "refuse",
        compile=bool(args.compile),
        **pins,
    )


def _loss(args: argparse.Namespace) -> Callable[..., Any] | None:
    return named_function(args.loss, "--loss") if args.loss else None


def _of_plan(args: argparse.Namespace, plan: Plan) -> Parallelized:
    """The program of a plan that was edited by hand: checked as any other, with what it costs as it stands."""
    if given := [name for name in (*_OF_THE_PLAN, "forbid") if getattr(args, name) not in (None, [])]:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise PlanError(f"{options}: with --plan this is read from {args.plan}; edit it there")
    loss = _loss(args)
    model, inputs = named_model(args.model, args.inputs)
    result = parallelize(
        model,
        args.gpus or plan.mesh.world_size,
        gpu=args.gpu,
        memory=args.memory,
        inputs=inputs,
        loss=loss,
        sequence=plan.batch.tokens,
        pad_to_multiple_of=plan.batch.sequence if plan.batch.padded else None,
        global_batch=plan.batch.global_batch,
        precision=plan.compute.precision,
        optimizer=(plan.optimizer.name, plan.optimizer.kwargs),
        batch_norm=args.batch_norm or "refuse",
        compile=plan.compute.compile,
        sequence_parallel=_LAYOUTS.get(plan.solution.name),
        attention=plan.context.name or None,
        virtual_stages=plan.virtual_stages,
        **plan.pinned,
    )
    return with_given(result, plan)


def _forbidden(given: Sequence[str]) -> dict[str, list[Any]]:
    """["zero=3", "zero=2", "schedule=gpipe"] → {"zero": [3, 2], "schedule": ["gpipe"]}."""
    forbid: dict[str, list[Any]] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise PlanError(f"--forbid {text}: write name=value, as in --forbid zero=3")
        name = name.replace("-", "_")
        forbid.setdefault(name, []).append(OPTIONS[name].read(value) if name in OPTIONS else value)
    return forbid
