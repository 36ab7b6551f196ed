"""`verify`: the emitted program against the original, trained side by side in fp64 on CPU processes.

The original trains here on the whole global batch; a child process forks the ranks of the program, which
compare loss, every gradient, norms and weights with it on every rank. A model that is too large is shrunk:
the same layer classes and plan structure, fewer and narrower layers, a mesh of at most 8 processes. Dropout is
off on both sides: its masks are drawn per rank.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from .compiler import compile_program, prepare
from .emit.emission import Predicted
from .emit.load import load_source
from .emit.source import model_source
from .errors import PlanError
from .ir.graph import B, Program, Role, S, arguments, info
from .mesh import Mesh
from .parity import Parity, part_errors, relative_error, train_original
from .plan import Plan
from .progress import progress
from .request import Job, with_loss
from .trace.huggingface import is_huggingface

_LARGEST = 40_000_000  # parameters that are trained as they are, in fp64
_MOST_PROCESSES = 8
_TIMEOUT_S = 300
_IGNORED = -100  # the target that F.cross_entropy skips by default

aten = torch.ops.aten
_DROPOUT_ARGUMENT: dict[Any, int] = {aten.dropout.default: 1, aten.scaled_dot_product_attention.default: 4}
_SIZE_DIM: dict[Any, int] = {aten.embedding.default: 0, aten.cross_entropy_loss.default: 1}  # of what ids index


def verify_plan(job: Job, plan: Plan, steps: int) -> Parity:
    """Train original and program for `steps` steps; raises PlanError where the model cannot be run here."""
    model, plan, note = _small_enough(job, plan)
    plan = replace(plan, precision="fp64")
    model = copy.deepcopy(model).double().train()
    program, dropped = _without_dropout(prepare(model, job.inputs, "fp64"))
    notes = [note] * bool(note) + ["dropout set to 0 on both sides"] * dropped
    source = model_source(compile_program(program, plan), plan, Predicted())
    batches = [_batch(program, plan, seed) for seed in range(steps)]
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    weights = {name: tensor.detach().clone() for name, tensor in named}
    constants = {name: value for name, value in job.inputs.items() if not isinstance(value, Tensor)}
    if is_huggingface(model):
        constants["use_cache"] = False
    with progress(f"training the original for {steps} steps"):
        reference = train_original(model, batches, constants, _optimizer(model, plan))
    if not all(map(math.isfinite, reference["losses"])):
        raise PlanError(f"the model's own losses are {reference['losses']}: there is nothing to compare with")
    processes = plan.mesh.world_size
    with (
        tempfile.TemporaryDirectory(prefix="autopar-verify-") as folder,
        progress(f"training the program on {processes} processes for {steps} steps"),
    ):
        torch.save({"weights": weights, "batches": batches, "reference": reference}, Path(folder) / "job.pt")
        (Path(folder) / "model.py").write_text(source)
        _run_child(folder)
        reports = json.loads((Path(folder) / "errors.json").read_text())
    return Parity(**_largest(reports, reference), steps=steps, processes=processes, note=" · ".join(notes))


def _largest(reports: Sequence[Mapping[str, Any]], reference: Mapping[str, Any]) -> dict[str, Any]:
    """The largest errors over the ranks; PlanError where no rank has a tensor of the reference."""
    largest: dict[str, Any] = {what: max(float(r[what]) for r in reports) for what in ("loss", "norm")}
    for what in ("gradients", "weights"):
        pairs = [pair for report in reports for pair in report[what].items()]
        if missing := sorted(reference[what].keys() - {name for name, _ in pairs}):
            raise PlanError(f"no rank of the program has the {what} of {', '.join(missing)}")
        largest[f"worst_{what[:-1]}"], largest[what] = max(pairs, key=lambda pair: float(pair[1]))
    return largest


def _without_dropout(program: Program) -> tuple[Program, bool]:
    """The same ops with every dropout probability 0, and whether one was not."""
    program, dropped = program.copy_blocks(), False
    for _, node in program.each_op():
        place = _DROPOUT_ARGUMENT.get(node.target)
        if place is not None and len(node.args) > place:
            dropped |= bool(node.args[place])
            node.update_arg(place, 0.0)
    return program, dropped


def _small_enough(job: Job, plan: Plan) -> tuple[nn.Module, Plan, str]:
    """The model and plan as they are, or shrunk with the plan's structure."""
    size = sum(p.numel() for p in job.model.parameters())
    hollow = any(p.is_meta for p in job.model.parameters())
    if size <= _LARGEST and plan.mesh.world_size <= _MOST_PROCESSES:
        return _with_values(job) if hollow else job.model, _fewer_samples(plan), ""
    if not is_huggingface(job.model):
        raise PlanError(
            f"{size / 1e6:.0f} M parameters on {plan.mesh.world_size} processes are too many here: verify a smaller "
            f"model of the same classes (at most {_LARGEST / 1e6:.0f} M parameters, {_MOST_PROCESSES} processes)"
        )
    mesh = Mesh(pp=min(plan.mesh.pp, 2), dp=min(plan.mesh.dp, 2), tp=min(plan.mesh.tp, 2))
    layers = 2 * mesh.pp
    stages = tuple((i * 2, i * 2 + 2) for i in range(mesh.pp))
    schedule = plan.schedule if mesh.pp > 1 else "none"
    recompute = tuple(range(layers)) if plan.recompute else ()
    small = replace(
        plan, mesh=mesh, stages=stages, schedule=schedule, recompute=recompute, micro_batch=1,
        global_batch=2 * mesh.pp * mesh.dp, sequence=32,
    )  # fmt: skip
    return _shrunk(job.model, layers), small, f"shrunk to {layers} narrow layers on {mesh}"


def _with_values(job: Job) -> nn.Module:
    """A meta model again, on the CPU."""
    if job.factory is not None:
        model = _seeded(job.factory)
        return model if job.loss is None else with_loss(model, job.loss, job.inputs)
    if not is_huggingface(job.model):
        raise PlanError("the model has no values to compare with: build it on the CPU, or pass its factory")
    kind, config = type(job.model), copy.deepcopy(job.model.config)
    return _seeded(lambda: kind(config))


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


def _fewer_samples(plan: Plan) -> Plan:
    """At most four micro-batches: enough for every phase of a schedule."""
    batches = min(plan.accumulation, max(4, plan.mesh.pp))
    return replace(plan, global_batch=batches * plan.micro_batch * plan.mesh.dp)


def _shrunk(model: nn.Module, layers: int) -> nn.Module:
    """A Hugging Face model of the same class with few, narrow layers and the same head grouping."""
    config: Any = copy.deepcopy(model.config)
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    narrow = {"num_hidden_layers": layers, "vocab_size": 256, "head_dim": 8}
    ratio = heads // groups if groups else 1
    narrow |= {"num_attention_heads": 4 * ratio, "num_key_value_heads": 4, "hidden_size": 32 * ratio}
    narrow["intermediate_size"] = 64 * ratio
    for name, value in narrow.items():
        if hasattr(config, name) and getattr(config, name) is not None:
            setattr(config, name, value)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, token, None)
    if hasattr(config, "layer_types") and config.layer_types:
        config.layer_types = config.layer_types[:layers]
    return _seeded(lambda: type(model)(config))


def _batch(program: Program, plan: Plan, seed: int) -> dict[str, Tensor]:
    """Random samples for the model's inputs; a fifth of the targets, and one whole sample, are ignored."""
    generator = torch.Generator().manual_seed(seed)
    sizes, ignored = _ranges(program)
    batch: dict[str, Tensor] = {}
    for name, facts in program.inputs.items():
        shape = [int(size.subs({B: plan.global_batch, S: plan.sequence})) for size in facts.shape]
        if facts.dtype.is_floating_point:
            batch[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
            continue
        batch[name] = torch.randint(0, sizes.get(name, 2), shape, generator=generator).to(facts.dtype)
        if name in ignored:
            batch[name][torch.rand(shape, generator=generator) < 0.2] = ignored[name]
            if plan.global_batch > 1:
                batch[name][0] = ignored[name]
    return batch


def _ranges(program: Program) -> tuple[dict[str, int], dict[str, int]]:
    """How many values an input that is ids or targets may take; which is ignored, of those that are targets only."""
    sizes: dict[str, int] = {}
    ignored: dict[str, int] = {}
    ids: set[str] = set()
    for _, node in (found for found in program.each_op() if found[1].target in _SIZE_DIM):
        whole, index = arguments(node)[:2]
        name, size = _input_name(index), int(info(whole).shape[_SIZE_DIM[node.target]])
        sizes[name] = min(size, sizes.get(name, size))
        if node.target is aten.embedding.default:
            ids.add(name)
        else:
            ignored[name] = arguments(node)[4] if len(node.args) > 4 else _IGNORED
    sizes.pop("", None)
    return sizes, {name: value for name, value in ignored.items() if name not in ids}


def _input_name(node: Any) -> str:
    """The model's input that a node is a view of; "" for none."""
    while isinstance(node, fx.Node) and info(node).role is not Role.INPUT:
        node = node.args[0] if node.args else None
    return info(node).ref if isinstance(node, fx.Node) else ""


def _optimizer(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    def own(name: str) -> Mapping[str, Any]:
        return next((options for names, options in plan.optimizer.groups if name in names), {})

    groups = [{"params": parameter, **own(name)} for name, parameter in model.named_parameters()]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, plan.optimizer.name)(groups, **plan.optimizer.kwargs)
    return optimizer


# The child process: forks the ranks of the program. It has computed nothing before, so forking is safe.


def _run_child(folder: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "autopar.verification", folder]
    child = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, said = child.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        _kill_group(child)
        said = child.communicate()[1]
        raise PlanError(f"the program did not finish within {_TIMEOUT_S} s: it hangs\n{said}") from error
    finally:
        _kill_group(child)
    if child.returncode:
        raise PlanError(f"the program failed:\n{said.strip()}")


def _kill_group(child: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _main(folder: Path) -> None:
    torch.set_num_threads(1)
    job = torch.load(folder / "job.pt", weights_only=True)
    program = load_source((folder / "model.py").read_text())
    world_size = program.SETTINGS.world_size
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    for rank in range(world_size):
        context.Process(target=_rank, args=(rank, pipes, folder, program, job), daemon=True).start()
    for _, sender in pipes:
        sender.close()
    pending = {receiver: rank for rank, (receiver, _) in enumerate(pipes)}
    reports = []
    while pending:
        for receiver in (r for r in wait(list(pending)) if isinstance(r, Connection)):
            rank = pending.pop(receiver)
            try:
                reports.append(receiver.recv())
            except EOFError:
                sys.exit(f"rank {rank} ended without a result")  # it has printed its traceback
    (folder / "errors.json").write_text(json.dumps(reports))


def _rank(rank: int, pipes: Sequence[tuple[Connection, Connection]], folder: Path, program: Any, job: Any) -> None:
    """Train and compare on one rank; of the pipes it keeps its own end, so that the end of a rank is the pipe's."""
    for end in (end for number, pipe in enumerate(pipes) for end in pipe[: 1 if number == rank else 2]):
        end.close()
    faulthandler.dump_traceback_later(0.9 * _TIMEOUT_S)  # where it hangs
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(pipes)), "LOCAL_RANK": str(rank)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store, limit = f"file://{folder / 'store'}", timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group("gloo", store, rank=rank, world_size=len(pipes), timeout=limit)
    from .runtime.trainer import Trainer  # after the fork: the parent needs no process group

    trainer = Trainer(program, job["weights"], seed=0, device="cpu")
    share, replica = program.SETTINGS.global_batch // program.SETTINGS.dp, trainer.mesh.rank("dp")
    reference, losses, norms = job["reference"], [], []
    gradients: dict[str, float] = {}
    for step, batch in enumerate(job["batches"]):
        own = {name: value[replica * share : (replica + 1) * share] for name, value in batch.items()}
        result = trainer.step(own)
        losses.append(relative_error(result.loss, reference["losses"][step]))
        norms.append(relative_error(result.grad_norm, reference["norms"][step]))
        if step == 0:
            gradients = part_errors(trainer.gradients(), reference["gradients"])
    weights = part_errors(trainer.state_dict(), reference["weights"])
    pipes[rank][1].send({"loss": max(losses), "norm": max(norms), "gradients": gradients, "weights": weights})
    dist.barrier()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
