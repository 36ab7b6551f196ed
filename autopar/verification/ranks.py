"""A program on CPU processes, in fp64 and without dropout: trained beside a reference, or to be one.

A child process forks the ranks. It has computed nothing before, so forking is safe; it ends with its ranks, and
every wait has an end.
"""

from __future__ import annotations

import ast
import faulthandler
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..emit.project import KEPT_RUNTIME
from ..emit.source import load_source
from ..errors import PlanError
from ..runtime.opaque import FILE
from .parity import no_dropout, part_errors, relative_error
from .same_draws import same_draws

TIMEOUT_S = 300
_AFTER_A_FAILURE_S = 5
_STEPS = "steps"  # the file that gets a byte a step
_LOWER = ("bfloat16", "float16", "half", "float32", "float")  # dtypes of torch, and methods that cast to them


@dataclass(frozen=True)
class Task:
    """What the ranks run, put into a folder as job.pt.

    sources: of a saved program, which runs with its own runtime; None is model.py in the task's folder.
    weights: by original name; None are those of `folder`. reference: what `train_original` gives; None makes one.
    draws: whether the program may draw random numbers, which are then the same for every sample.
    global_batch, sequence: over those of the program's SETTINGS.
    """

    batches: Sequence[Mapping[str, Tensor]]
    weights: Mapping[str, Tensor] | None
    reference: Mapping[str, Any] | None
    sources: str | None = None
    folder: str | None = None
    global_batch: int | None = None
    sequence: int | None = None
    draws: bool = True


def run_task(task: Task, folder: Path) -> list[dict[str, Any]]:
    """What each rank reports: losses, norms, and its errors against the reference, or where it left its tensors."""
    torch.save(vars(task), folder / "job.pt")
    _run_child(folder)
    reports: list[dict[str, Any]] = json.loads((folder / "reports.json").read_text())
    return reports


def steps_done(folder: Path) -> int:
    """How many steps a task has done so far."""
    path = folder / _STEPS
    return path.stat().st_size if path.exists() else 0


def reference_of(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The reference that ranks have made: whole tensors of every stage."""
    reference: dict[str, Any] = {"losses": reports[0]["losses"], "norms": reports[0]["norms"]}
    for what in ("gradients", "weights"):
        reference[what] = {}
    for path in (report["tensors"] for report in reports if report["tensors"]):
        saved = torch.load(path, weights_only=True)
        for what in ("gradients", "weights"):
            reference[what] |= saved[what]
    return reference


def _run_child(folder: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", __name__, str(folder)]
    child = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, said = child.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        _kill_group(child)
        said = child.communicate()[1]
        raise PlanError(f"the program did not finish within {TIMEOUT_S} s: it hangs\n{said}") from error
    finally:
        _kill_group(child)
    if child.returncode:
        raise PlanError(f"the program failed:\n{said.strip()}")


def _kill_group(child: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


# --------------------------------------------------------------------------------
# The child process


def _main(folder: Path) -> None:
    torch.set_num_threads(1)
    job = torch.load(folder / "job.pt", weights_only=True)
    if job["sources"]:
        sys.path[:0] = [job["sources"], str(Path(job["sources"]) / KEPT_RUNTIME)]
        program = _load_raised(Path(job["sources"]) / "model.py", job)
    else:
        program = load_source((folder / "model.py").read_text())
        if (folder / FILE).exists():
            program.OPAQUE.file = folder / FILE
    world_size = program.SETTINGS.world_size
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    for rank in range(world_size):
        context.Process(target=_rank, args=(rank, pipes, folder, program, job), daemon=True).start()
    for _, sender in pipes:
        sender.close()
    reports, failures = _gathered({receiver: rank for rank, (receiver, _) in enumerate(pipes)})
    if failures:
        _, rank, said = min(failures)
        others = f" (the other {len(failures) - 1} then lost it)" if len(failures) > 1 else ""
        sys.exit(f"rank {rank} failed first{others}:\n{said}")
    (folder / "reports.json").write_text(json.dumps(reports))


def _gathered(pending: dict[Connection, int]) -> tuple[list[dict[str, Any]], list[tuple[float, int, str]]]:
    """What the ranks report, and the failures: when, of which rank, and how.

    A rank that is killed says nothing, and those that lose it for that fail after it. Some may wait for a lost one.
    """
    reports, failures = list[dict[str, Any]](), list[tuple[float, int, str]]()
    while pending and (ready := wait(list(pending), _AFTER_A_FAILURE_S if failures else None)):
        for receiver in (r for r in ready if isinstance(r, Connection)):
            rank = pending.pop(receiver)
            try:
                said = receiver.recv()
            except EOFError:
                said = {"failed": "it was killed (out of memory?) or has ended its process", "at": 0.0}
            if "failed" in said:
                failures.append((said["at"], rank, said["failed"]))
            else:
                reports.append(said)
    return reports, failures


def _load_raised(source: Path, job: Mapping[str, Any]) -> Any:
    """A saved model.py, line by line as it is, but in fp64 and without dropout."""
    without_dropout(importlib.import_module("runtime.random"))
    tree = ast.parse(source.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch" and node.attr in _LOWER:
            node.attr = "float64"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
            node.func.attr = "double" if node.func.attr in _LOWER else node.func.attr
    program: Any = ModuleType("model")
    program.__file__ = str(Path(job["folder"]) / "model.py")  # beside its weights
    exec(compile(tree, str(source), "exec"), program.__dict__)  # the user's own program, which they ask to run
    asked = {name: job[name] for name in ("global_batch", "sequence") if job[name]}
    if getattr(program.SETTINGS, "reduce_dtype", None):
        asked["reduce_dtype"] = None
    program.SETTINGS = replace(program.SETTINGS, precision="fp64", **asked)
    return program


def without_dropout(random: Any) -> None:
    """The runtime's own dropout, which draws its masks itself, with probability 0."""
    attention = random.attention
    random.dropout = lambda x, *args, **kwargs: x
    random.attention = lambda q, k, v, p, *args, **kwargs: attention(q, k, v, 0.0, *args, **kwargs)


def _rank(rank: int, pipes: Sequence[tuple[Connection, Connection]], folder: Path, program: Any, job: Any) -> None:
    """Train and compare on one rank; of the pipes it keeps its own end, so that the end of a rank is the pipe's."""
    for end in (end for number, pipe in enumerate(pipes) for end in pipe[: 1 if number == rank else 2]):
        end.close()
    faulthandler.dump_traceback_later(0.9 * TIMEOUT_S)  # where it hangs
    sender = pipes[rank][1]
    try:
        sender.send(_trained(rank, len(pipes), folder, program, job))
    except Exception:  # noqa: BLE001 - told by the parent, where it was the first
        sender.send({"failed": traceback.format_exc(), "at": time.monotonic()})
        return
    dist.barrier()


def _trained(rank: int, world_size: int, folder: Path, program: Any, job: Any) -> dict[str, Any]:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store, limit = f"file://{folder / 'store'}", timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store, rank=rank, world_size=world_size, timeout=limit)
    # After the fork: the parent needs no process group.
    runtime = importlib.import_module("runtime.trainer" if job["sources"] else "autopar.runtime.trainer")
    if job["sources"]:
        _check_values(runtime.Trainer(program, seed=0, device="cpu"))
    trainer = runtime.Trainer(program, job["weights"], seed=0, device="cpu")
    share, replica = program.SETTINGS.global_batch // program.SETTINGS.dp, trainer.mesh.rank("dp")
    losses, norms, gradients = [], [], {}
    for step, batch in enumerate(job["batches"]):
        own = {name: value[replica * share : (replica + 1) * share] for name, value in batch.items()}
        with no_dropout(), same_draws() if job["draws"] else nullcontext():
            result = trainer.step(own)
        if rank == 0:
            with (folder / _STEPS).open("a") as file:
                file.write(".")
        losses.append(result.loss)
        norms.append(result.grad_norm)
        if step == 0:
            gradients = {name: gradient.clone() for name, gradient in trainer.gradients().items()}
    report = {"losses": losses, "norms": norms}
    return report | _found(trainer, gradients, job["reference"], folder / f"rank{rank}.pt")


def _check_values(trainer: Any) -> None:
    """ValueError where the folder's own values, which training begins with, are not numbers."""
    if wrong := [name for name, value in trainer.state_dict().items() if not value.isfinite().all()]:
        raise ValueError(f"{', '.join(wrong[:5])}: not finite in the folder's weights.pt")


def _found(trainer: Any, gradients: dict[str, Tensor], reference: Any, path: Path) -> dict[str, Any]:
    """Errors against the reference; without one, the tensors of the ranks that hold each first, at `path`."""
    tensors = {"gradients": gradients, "weights": trainer.state_dict()}
    if reference is not None:
        return {what: part_errors(mine, reference[what]) for what, mine in tensors.items()}
    if any(trainer.mesh.rank(axis) for axis in ("dp", "cp", "tp")):
        return {"tensors": None}
    torch.save(tensors, path)
    return {"tensors": str(path)}


def relative(measured: Sequence[float], expected: Sequence[float]) -> list[float]:
    """|a − b| / |b| of each step."""
    return [relative_error(a, b) for a, b in zip(measured, expected, strict=True)]


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
