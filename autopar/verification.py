"""`verify`: the emitted program against the original, trained side by side in fp64 on CPU processes.

The original trains here on the whole global batch; a child process forks the ranks of the program, which
compare loss, every gradient, norms and weights with it on every rank. A model that is too large is shrunk:
the same layer classes and plan structure, fewer and narrower layers, a mesh of at most 8 processes.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .compiler import compile_program, prepare
from .emit.emission import Predicted
from .emit.load import load_source
from .emit.source import model_source
from .errors import PlanError
from .mesh import Mesh
from .parity import raise_float32, relative_errors
from .plan import Plan
from .request import Job
from .trace.huggingface import is_huggingface

_LARGEST = 40_000_000  # parameters that are trained as they are, in fp64
_MOST_PROCESSES = 8
_TIMEOUT_S = 300
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Parity:
    """The largest errors over all ranks, by the contract's metric (DESIGN, top), and where they are."""

    loss: float
    gradients: float
    norm: float
    weights: float
    worst_gradient: str
    worst_weight: str
    steps: int
    processes: int
    note: str = ""

    @property
    def holds(self) -> bool:
        """Whether every error is within the contract's 1e-9."""
        return max(self.loss, self.gradients, self.norm, self.weights) <= TOLERANCE

    def __str__(self) -> str:
        verdict = "computes what the model computes" if self.holds else "DIFFERS from the model"
        return (
            f"the program on {self.processes} processes {verdict}: after {self.steps} steps in fp64 the largest "
            f"difference to one process is {self.loss:.1e} (loss), {self.gradients:.1e} (gradients, "
            f"{self.worst_gradient}), {self.norm:.1e} (total norm), {self.weights:.1e} (weights, {self.worst_weight})"
            f"; bound {TOLERANCE:.0e}{f' · {self.note}' if self.note else ''}"
        )


def verify_plan(job: Job, plan: Plan, steps: int) -> Parity:
    """Train original and program for `steps` steps; raises PlanError where the model cannot be run here."""
    model, plan, note = _small_enough(job, plan)
    plan = replace(plan, precision="fp64", recompute=_clip_layers(plan))
    model = copy.deepcopy(model).double().train()
    inputs = {k: v for k, v in job.inputs.items()}
    program = prepare(model, inputs, "fp64")
    source = model_source(compile_program(program, plan), plan, Predicted())
    batches = [_batch(model, inputs, plan, seed) for seed in range(steps)]
    print(
        f"verify: {steps} steps of the original and of the program on {plan.mesh.world_size} processes", file=sys.stderr
    )
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    weights = {name: tensor.detach().clone() for name, tensor in named}
    reference = _train_original(model, batches, plan, program.tied)
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as folder:
        torch.save({"weights": weights, "batches": batches, "reference": reference}, Path(folder) / "job.pt")
        (Path(folder) / "model.py").write_text(source)
        _run_child(folder)
        errors = json.loads((Path(folder) / "errors.json").read_text())
    return Parity(**errors, steps=steps, processes=plan.mesh.world_size, note=note)


def _small_enough(job: Job, plan: Plan) -> tuple[nn.Module, Plan, str]:
    """The model and plan as they are, or shrunk with the plan's structure."""
    size = sum(p.numel() for p in job.model.parameters())
    hollow = any(p.is_meta for p in job.model.parameters())
    if size <= _LARGEST and plan.mesh.world_size <= _MOST_PROCESSES:
        model = job.model
        if hollow and job.factory is not None:
            model = job.factory()
        elif hollow and is_huggingface(model):
            model = type(model)(copy.deepcopy(model.config))
        elif hollow:
            raise PlanError("the model has no values to compare with: build it on the CPU, or pass its factory")
        return model, _fewer_samples(plan), ""
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shrunk: nn.Module = type(model)(config)
    return shrunk


def _clip_layers(plan: Plan) -> tuple[int, ...]:
    return tuple(i for i in plan.recompute if i < plan.stages[-1][1])


def _batch(model: nn.Module, inputs: Mapping[str, Any], plan: Plan, seed: int) -> dict[str, Tensor]:
    """Random samples shaped like the example inputs; a fifth of the labels, and one whole sample, are padding."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = min(
        (p.shape[0] for n, p in model.named_parameters() if p.dim() == 2 and ("emb" in n or "wte" in n)), default=2
    )
    batch: dict[str, Tensor] = {}
    for name, example in inputs.items():
        if not isinstance(example, Tensor):
            continue
        shape = [plan.global_batch, *example.shape[1:]]
        if example.dim() > 1 and not example.is_floating_point():
            shape[1] = plan.sequence
        if example.is_floating_point():
            batch[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
            continue
        batch[name] = torch.randint(0, vocabulary, shape, generator=generator)
        if name == "labels":
            batch[name][torch.rand(shape, generator=generator) < 0.2] = -100
            if plan.global_batch > 1:
                batch[name][0] = -100
    return batch


def _train_original(
    model: nn.Module, batches: list[dict[str, Tensor]], plan: Plan, tied: Mapping[str, str]
) -> dict[str, Any]:
    """Losses and norms of each step, gradients of the first, weights after the last."""
    options = [{"params": p, **_group_options(plan, n)} for n, p in model.named_parameters()]
    optimizer = getattr(torch.optim, plan.optimizer.name)(options, **plan.optimizer.kwargs)
    result: dict[str, Any] = {"losses": [], "norms": []}
    for batch in batches:
        optimizer.zero_grad()
        with raise_float32():
            outputs = model(**batch, **({"use_cache": False} if is_huggingface(model) else {}))
            loss = outputs if isinstance(outputs, Tensor) else outputs[0]
            loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        result["losses"].append(loss.item())
        result["norms"].append(float(torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()))
        result.setdefault("gradients", gradients)
        optimizer.step()
    result["weights"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    return result


def _group_options(plan: Plan, name: str) -> dict[str, Any]:
    return next((dict(own) for names, own in plan.optimizer.groups if name in names), {})


# The child process: forks the ranks of the program. It has computed nothing before, so forking is safe.


def _run_child(folder: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "autopar.verification", folder]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise PlanError(f"the program did not finish within {_TIMEOUT_S} s: it hangs\n{error.stderr!r}") from error
    if done.returncode:
        raise PlanError(f"the program failed:\n{done.stderr.strip()}")


def _main(folder: Path) -> None:
    torch.set_num_threads(1)
    job = torch.load(folder / "job.pt", weights_only=True)
    program = load_source((folder / "model.py").read_text())
    world_size = program.SETTINGS.world_size
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    ranks = [
        context.Process(target=_rank, args=(rank, world_size, folder, program, job, pipes[rank][1]), daemon=True)
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    for _, ours in pipes:
        ours.close()
    errors = []
    for receiver, _ in pipes:
        try:
            errors.append(receiver.recv())
        except EOFError:
            sys.exit(1)  # the rank has printed its traceback
    largest = {k: max(float(e[k]) for e in errors) for k in ("loss", "norm")}
    for what in ("gradients", "weights"):
        name, error = max((e[what] for e in errors), key=lambda item: item[1])
        largest[what], largest[f"worst_{what[:-1]}"] = error, name
    (folder / "errors.json").write_text(json.dumps(largest))


def _rank(rank: int, world_size: int, folder: Path, program: Any, job: Any, pipe: Connection) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store, limit = f"file://{folder / 'store'}", timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group("gloo", store, rank=rank, world_size=world_size, timeout=limit)
    from .runtime.trainer import Trainer  # after the fork: the parent needs no process group

    trainer = Trainer(program, job["weights"], seed=0, device="cpu")
    share, replica = program.SETTINGS.global_batch // program.SETTINGS.dp, trainer.mesh.rank("dp")
    reference, loss, norm = job["reference"], 0.0, 0.0
    gradients: tuple[str, float] = ("", 0.0)
    for step, batch in enumerate(job["batches"]):
        own = {name: value[replica * share : (replica + 1) * share] for name, value in batch.items()}
        result = trainer.step(own)
        loss = max(loss, _relative(result.loss, reference["losses"][step]))
        norm = max(norm, _relative(result.grad_norm, reference["norms"][step]))
        if step == 0:
            gradients = _worst(trainer.gradients(), reference["gradients"])
    weights = _worst(trainer.state_dict(), reference["weights"])
    pipe.send({"loss": loss, "norm": norm, "gradients": gradients, "weights": weights})
    dist.barrier()


def _relative(actual: float, expected: float) -> float:
    return abs(actual - expected) / max(abs(expected), 1e-300)


def _worst(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[str, float]:
    """The largest error of this rank's tensors; each stage has some of the model's."""
    errors = relative_errors(actual, {name: expected[name] for name in actual})
    return max(errors.items(), key=lambda item: item[1])


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
