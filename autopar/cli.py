"""The command line: `autopar plan | emit | run | verify`.

A model is named as `module:function`, a function without arguments that builds it, or as a Hugging Face config:
a file, a folder with config.json, or a name whose config is in the local cache.
"""

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

from .api import Parallelized, parallelize
from .errors import PlanError
from .given_plan import with_given
from .mesh import AXES
from .plan import CONTEXT_LAYOUTS, PRECISIONS, Plan
from .schedules import SCHEDULES
from .search.explain import why_not
from .search.search import Candidate
from .solutions import with_placements
from .trace.named import named_function, named_model
from .verification.folder import verify_folder

_PINS = (
    "pp", "dp", "cp", "tp", "zero", "hsdp", "offload", "micro_batch", "schedule", "virtual_stages", "recompute",
    "loss_chunks", "reduce_dtype", "attention",
)  # fmt: skip
_OF_THE_PLAN = (
    "sequence", "pad_to_multiple_of", "global_batch", "precision", "optimizer", "lr", "sequence_parallel", "forbid",
    "compile", *_PINS,
)  # fmt: skip
_LAYOUTS = {"megatron": False, "megatron-sp": True}

_EXAMPLES = """\
examples:
  autopar plan meta-llama/Llama-3.1-8B --gpus 64 --sequence 8192 --global-batch 512 --explain
  autopar emit examples.gpt:build --inputs my_data:example --gpus 4 --gpu cpu --out gpt-4
  autopar run gpt-4 -- --steps 100 --log train.jsonl
  autopar verify examples.llama:tiny_llama --gpus 4 --gpu cpu --tp 2
  autopar verify gpt-4
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. A PlanError is one message and code 2 (AUTOPAR_DEBUG=1: its traceback)."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.command(args)
    except PlanError as error:
        if os.environ.get("AUTOPAR_DEBUG"):
            raise
        print(f"autopar: {error}", file=sys.stderr)
        return 2
    return code


# --------------------------------------------------------------------------------
# Commands


def _plan(args: argparse.Namespace) -> int:
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


def _emit(args: argparse.Namespace) -> int:
    result = _of_plan(args, Plan.load(args.plan)) if args.plan else _parallelized(args)
    result.save(args.out)
    print(result)
    print(f"\nwrote {args.out}; train it with: autopar run {args.out} -- --steps 100")
    return 0


def _run(args: argparse.Namespace) -> int:
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
    return subprocess.run([sys.executable, *launch, *_after_dashes(args.arguments)]).returncode


def _verify(args: argparse.Namespace) -> int:
    if (Path(args.model) / "plan.yaml").exists():
        comparison = verify_folder(Path(args.model), args.original, args.steps)
        print(comparison)
        return 0 if comparison.same else 1
    parity = _parallelized(args).verify(args.steps)
    print(parity)
    return 0 if parity.holds else 1


def _after_dashes(arguments: list[str]) -> list[str]:
    return arguments[1:] if arguments[:1] == ["--"] else arguments


def _machine_readable(result: Parallelized) -> dict[str, Any]:
    """The chosen plan with its estimate, the runners-up with what they lose, and what was searched."""
    found = result.result

    def shown(candidate: Candidate) -> dict[str, Any]:
        plan = candidate.plan
        plan = with_placements(plan, result.solutions)
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
    model, inputs = named_model(args.model, args.inputs)
    return parallelize(
        model,
        args.gpus,
        gpu=args.gpu,
        memory=args.memory,
        inputs=inputs,
        loss=_loss(args),
        sequence=args.sequence,
        pad_to_multiple_of=args.pad_to_multiple_of,
        global_batch=args.global_batch,
        precision=args.precision,
        optimizer=(args.optimizer or "AdamW", {} if args.lr is None else {"lr": args.lr}),
        batch_norm=args.batch_norm,
        compile=bool(args.compile),
        sequence_parallel=args.sequence_parallel,
        forbid=_forbidden(args.forbid),
        **{name: getattr(args, name) for name in _PINS},
    )


def _loss(args: argparse.Namespace) -> Callable[..., Any] | None:
    return named_function(args.loss, "--loss") if args.loss else None


def _of_plan(args: argparse.Namespace, plan: Plan) -> Parallelized:
    """The program of a plan that was edited by hand: checked as any other, with what it costs as it stands."""
    if given := [name for name in _OF_THE_PLAN if getattr(args, name) not in (None, [])]:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise PlanError(f"{options}: with --plan this is read from {args.plan}; edit it there")
    model, inputs = named_model(args.model, args.inputs)
    result = parallelize(
        model,
        args.gpus or plan.mesh.world_size,
        gpu=args.gpu,
        memory=args.memory,
        inputs=inputs,
        loss=_loss(args),
        sequence=plan.tokens,
        pad_to_multiple_of=plan.sequence if plan.padded_from else None,
        global_batch=plan.global_batch,
        precision=plan.precision,
        optimizer=(plan.optimizer.name, plan.optimizer.kwargs),
        batch_norm=args.batch_norm,
        compile=plan.compile,
        sequence_parallel=_LAYOUTS.get(plan.solution.name),
        attention=plan.context.name or None,
        **{name: getattr(plan.mesh, name) for name in AXES},
        **{name: getattr(plan, name) for name in _PINS if name not in (*AXES, "attention")},
    )
    return with_given(result, plan)


def _forbidden(given: Sequence[str]) -> dict[str, list[Any]]:
    """["zero=3", "zero=2", "schedule=gpipe"] → {"zero": [3, 2], "schedule": ["gpipe"]}."""
    forbid: dict[str, list[Any]] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise PlanError(f"--forbid {text}: write name=value, as in --forbid zero=3")
        forbid.setdefault(name.replace("-", "_"), []).append(_value(value))
    return forbid


def _value(text: str) -> Any:
    return {"true": True, "false": False}.get(text.lower(), int(text) if text.isdigit() else text)


# --------------------------------------------------------------------------------
# Arguments


def _parser() -> argparse.ArgumentParser:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("autopar", description=__doc__, epilog=_EXAMPLES, formatter_class=kind)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text, formatter_class=kind)
        made.set_defaults(command=run)
        return made

    plan = command("plan", _plan, "find the fastest plan and print what it costs")
    _add_options(plan)
    plan.add_argument("--explain", action="store_true", help="time and memory of each stage, what runners-up lose")
    plan.add_argument("--json", action="store_true", help="print for machines: plan, estimate, runners-up, reasons")
    plan.add_argument("--save", type=Path, metavar="FILE", help="write the plan as YAML, for emit --plan")
    emit = command("emit", _emit, "write the program of the fastest plan, or of a given one")
    _add_options(emit)
    emit.add_argument("--out", type=Path, metavar="DIR", required=True, help="the folder to write")
    emit.add_argument("--plan", type=Path, metavar="FILE", help="this plan, perhaps edited, instead of a search")
    run = command("run", _run, "train a saved program on this machine, by torchrun")
    run.add_argument("folder", type=Path, metavar="DIR", help="what emit wrote")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="-- ...", help="arguments of train.py")
    verify = command("verify", _verify, "train program and model side by side in fp64 on the CPU; DIR: what was edited")
    _add_options(verify)
    verify.add_argument("--steps", type=int, default=5, metavar="N", help="how many to train (default: 5)")
    verify.add_argument(
        "--original", metavar="MODEL", help="of a folder: the model, where the folder does not know it by name"
    )
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="module:function, or a Hugging Face config (file, folder, name)")
    job = parser.add_argument_group("what to train, and on what").add_argument
    job("--inputs", metavar="MODULE:FUNCTION", help="gives example inputs (default: inputs() beside the model)")
    job("--loss", metavar="MODULE:FUNCTION", help="(outputs, batch) → scalar, where forward returns no loss")
    job("--gpus", type=int, metavar="N", help="how many (default: this machine's)")
    job("--gpu", metavar="NAME", help="h100-sxm-80gb, …, or cpu (default: this machine's)")
    job("--memory", metavar="SIZE", help="budget per GPU, as 70GiB (default: the GPU's usable memory)")
    job("--sequence", type=int, metavar="TOKENS", help="tokens of a sample")
    job("--pad-to-multiple-of", type=int, metavar="TOKENS", help="pad samples to the next multiple, out of the loss")
    job("--global-batch", type=int, metavar="SAMPLES", help="samples of a step (default: 8 a GPU)")
    job("--precision", choices=PRECISIONS, help="default: bf16, fp32 on a CPU")
    job("--compile", action="store_true", default=None, help="run the layers under torch.compile")
    job("--optimizer", metavar="NAME", help="an elementwise torch.optim class (default: AdamW)")
    job("--lr", type=float, help="learning rate (default: the optimizer's)")
    batch_norm = "of all replicas' samples, in one micro-batch (default: refuse)"
    job("--batch-norm", choices=("refuse", "synchronise"), default="refuse", help=batch_norm)
    pins = parser.add_argument_group("choices to fix").add_argument
    axes = {"pp": "pipeline stages", "dp": "replicas", "cp": "parts of a sequence", "tp": "tensor-parallel ranks"}
    for name, what in axes.items():
        pins(f"--{name}", type=int, metavar="N", help=what)
    pins("--attention", choices=CONTEXT_LAYOUTS, help="how the ranks of cp attend to the whole sequence")
    pins("--zero", type=int, choices=(0, 1, 2, 3), help="what replicas share out: states, gradients, parameters")
    pins("--hsdp", type=int, metavar="RANKS", help="that share out one copy, the groups being replicas (default: all)")
    pins("--offload", action=argparse.BooleanOptionalAction, help="masters, states and the optimizer on the host")
    pins("--micro-batch", type=int, metavar="SAMPLES", help="samples of a micro-batch")
    pins("--schedule", choices=SCHEDULES, help="of the pipeline")
    pins("--virtual-stages", type=int, metavar="N", help="stages of each pipeline rank (interleaved, zero-bubble)")
    pins(
        "--recompute",
        type=_recompute,
        metavar="WHAT",
        help="none, full, regions (attention core, mlp), groups of 2, layers a stage (2), or layers (0,1,5)",
    )
    pins("--loss-chunks", type=int, metavar="N", help="slices of the vocabulary for head and loss, 1 for none")
    pins("--reduce-dtype", choices=PRECISIONS, help="of gradients over the replicas: fp32, or that of --precision")
    pins("--sequence-parallel", action=argparse.BooleanOptionalAction, help="Megatron's layout with or without it")
    pins("--forbid", action="append", default=[], metavar="NAME=VALUE", help="ban a choice: zero=3; may be repeated")


def _recompute(text: str) -> str | int | tuple[int, ...]:
    if not text.rstrip(",").replace(",", "").isdigit():
        return text
    layers = tuple(int(part) for part in text.rstrip(",").split(","))
    return layers[0] if len(layers) == 1 and not text.endswith(",") else layers


if __name__ == "__main__":
    sys.exit(main())
