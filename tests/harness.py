"""What the tests share: ranks as forked processes, the reference run on one process, and parity assertions.

def both_ranks_agree(rank: int) -> Tensor:
    x = torch.ones(3) * rank
    dist.all_reduce(x)
    return x
first, second = run_ranks(2, both_ranks_agree)
"""

from __future__ import annotations

import copy
import faulthandler
import io
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import PlanError
from autopar.runtime.precision import raise_float32
from autopar.trace.moe import written_experts
from autopar.verification import ranks
from autopar.verification.parity import loss_of as loss_among
from autopar.verification.parity import relative_errors

__all__ = [
    "RankError",
    "Reference",
    "assert_golden",
    "assert_parity",
    "cast",
    "raise_float32",
    "reference_run",
    "relative_errors",
    "run_ranks",
    "verify_in_fork",
]

# A child forked from a parent whose matmuls ran on several threads hangs in its first matmul.
torch.set_num_threads(1)

# How long to listen for the other ranks once one has failed: a crash is heard of first through its peers.
_AFTERMATH_S = 0.3


class RankError(RuntimeError):
    """A rank failed, died or hung; the message holds its traceback."""


# --------------------------------------------------------------------------------
# Ranks as forked processes


@dataclass(frozen=True)
class _Report:
    """How a rank ended: with a result, by an error, or without a word."""

    result: bytes = b""
    error: str = ""
    died: str = ""
    time_s: float = field(default_factory=time.monotonic)

    @property
    def failed(self) -> bool:
        return bool(self.error or self.died)


@dataclass
class _Child:
    rank: int
    process: BaseProcess
    connection: Connection
    stack_file: Path
    report: _Report | None = None

    def listen(self) -> None:
        """Read the report that is ready; the end of the pipe means that the process is gone."""
        try:
            self.report = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            self.report = _Report(died=_exit_words(self.process.exitcode))


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Run `fn(rank, *args)` on `world_size` forked processes joined by gloo; the results in order of rank.

    `fn` may be a closure; results are pickled (tensors included). Each rank starts with seed 0, RANK,
    WORLD_SIZE and LOCAL_RANK set, and the default process group made. Raises RankError: the traceback of the
    first rank that fails, or, after `timeout` seconds, the ranks still running and where they are. No process
    outlives the call.
    """
    with (
        tempfile.TemporaryDirectory(prefix="autopar-ranks-") as folder,
        _fork(world_size, fn, args, Path(folder), timeout) as children,
    ):
        _listen_until(children, time.monotonic() + timeout)
        if any(child.report and child.report.failed for child in children):
            _listen_until(children, time.monotonic() + _AFTERMATH_S, even_after_failure=True)
            raise RankError(_describe_failure(children))
        if any(child.report is None for child in children):
            raise RankError(_describe_hang(children, timeout))
        reports = [child.report for child in children if child.report]
        return [torch.load(io.BytesIO(report.result), weights_only=False) for report in reports]


def verify_in_fork(folder: Path) -> None:
    """The child process of `verify`, which this one has forked: it need not import torch."""
    child = multiprocessing.get_context("fork").Process(target=ranks._main, args=(folder,))
    child.start()
    child.join(120)
    if child.exitcode:
        raise PlanError(f"the program failed: exit code {child.exitcode}")


def _listen_until(children: Sequence[_Child], deadline: float, even_after_failure: bool = False) -> None:
    """Collect reports until all are in, one is a failure, or the time is over."""
    while pending := [child for child in children if child.report is None]:
        ready = wait([child.connection for child in pending], max(0.0, deadline - time.monotonic()))
        for child in pending:
            if child.connection in ready:
                child.listen()
        failed = any(child.report and child.report.failed for child in children)
        if not ready or (failed and not even_after_failure):
            return


@contextmanager
def _fork(
    world_size: int, fn: Callable[..., Any], args: tuple[Any, ...], folder: Path, timeout: float
) -> Iterator[list[_Child]]:
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(world_size)]
    children = []
    try:
        for rank, (ours, theirs) in enumerate(pipes):
            others = [end for pair in pipes for end in pair if end is not theirs]
            target_args = (rank, world_size, fn, args, folder, timeout, theirs, others)
            process = context.Process(target=_child_main, args=target_args, name=f"rank {rank}")
            process.start()
            children.append(_Child(rank, process, ours, folder / f"stack{rank}"))
        for _, theirs in pipes:
            theirs.close()
        yield children
    finally:
        for child in children:  # those that are done wait: a peer must not see their connections close
            child.process.kill()
            child.process.join()
            child.connection.close()


def _child_main(
    rank: int,
    world_size: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    folder: Path,
    timeout: float,
    connection: Connection,
    others: Sequence[Connection],
) -> None:
    for end in others:
        end.close()
    stack_file = open(folder / f"stack{rank}", "w")  # noqa: SIM115 - faulthandler writes to it at any time
    faulthandler.register(signal.SIGUSR1, stack_file, all_threads=False)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # not every machine resolves its own name
    try:
        torch.manual_seed(0)
        # Longer than ours: a hang is to be reported with the places of all ranks, not as gloo's timeout.
        limit = timedelta(seconds=timeout + 60)
        store = f"file://{folder / 'store'}"
        dist.init_process_group("gloo", store, rank=rank, world_size=world_size, timeout=limit)
        buffer = io.BytesIO()
        torch.save(fn(rank, *args), buffer)
        _flush()
        connection.send(_Report(result=buffer.getvalue()))
    except BaseException:
        _flush()
        connection.send(_Report(error=traceback.format_exc()))
    # Stay until killed, or until the parent is gone: while peers work, our connections must not close.
    # And never return: the exit handlers of this process are pytest's.
    wait([connection])
    os._exit(0)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _exit_words(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"died of {signal.Signals(-exit_code).name}"
    return f"died with exit code {exit_code}"


def _describe_failure(children: Sequence[_Child]) -> str:
    """The cause first: a rank that died without a word, else the first to tell. The others tell of it."""
    failed = [(child.rank, child.report) for child in children if child.report and child.report.failed]
    failed.sort(key=lambda item: (not item[1].died, item[1].time_s))
    (rank, report), *rest = failed
    lines = [f"rank {rank} of {len(children)} " + (report.died or f"failed:\n{report.error}")]
    for rank, report in rest:
        lines.append(f"then rank {rank}: {report.died or report.error.strip().splitlines()[-1]}")
    return "\n".join(lines)


def _has_stack(child: _Child) -> bool:
    return child.stack_file.exists() and child.stack_file.stat().st_size > 0


def _describe_hang(children: Sequence[_Child], timeout: float) -> str:
    pending = [child for child in children if child.report is None]
    for child in pending:
        if child.process.pid is not None:
            os.kill(child.process.pid, signal.SIGUSR1)  # faulthandler writes where the rank is
    deadline = time.monotonic() + 10 * _AFTERMATH_S
    while time.monotonic() < deadline and not all(map(_has_stack, pending)):
        time.sleep(0.02)
    ranks = ", ".join(str(child.rank) for child in pending)
    stacks = [f"rank {child.rank}:\n{child.stack_file.read_text()}" for child in pending if _has_stack(child)]
    return "\n".join([f"still running after {timeout:g} s: rank {ranks} of {len(children)}", *stacks])


# --------------------------------------------------------------------------------
# Parity


def assert_parity(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, what: str = "tensors"
) -> None:
    """AssertionError with the worst unless all errors, by the contract's metric, are ≤ `tolerance`."""
    errors = relative_errors(actual, expected)
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}  # NaN is wrong too
    if not wrong:
        return
    worst = sorted(wrong.items(), key=lambda item: -item[1] if item[1] == item[1] else float("-inf"))[:8]
    listing = "\n".join(f"  {error:9.2e}  {name}  {tuple(expected[name].shape)}" for name, error in worst)
    head = f"{len(wrong)} of {len(errors)} {what} differ by more than {tolerance:g}; worst:"
    raise AssertionError(f"{head}\n{listing}")


def assert_golden(path: Path, text: str, update: bool) -> None:
    """The file holds `text`; with `update` it is written first."""
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    held = path.read_text() if path.exists() else None
    assert held == text, f"{path.name} differs: if rightly so, run pytest --update-goldens and read the diff"


@dataclass(frozen=True)
class Reference:
    """What the original model does in training on one process, by original parameter name.

    `gradients[k]` are those of step k before clipping, `norms[k]` their total norm; `weights` those after the
    last step, with the persistent buffers.
    """

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    norms: list[float]
    weights: dict[str, Tensor]


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model in `dtype`; complex tables stay what they are (`Module.to` takes their real part)."""
    return model.double() if dtype == torch.float64 else model.to(dtype)


def reference_run(
    model: nn.Module,
    batches: Sequence[Mapping[str, Tensor]],
    optimizer_factory: Callable[[Any], torch.optim.Optimizer],
    clip: float | None = None,
    loss_of: Callable[[Any, Mapping[str, Tensor]], Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Reference:
    """Train a copy of `model` on `batches`, each a whole global batch of keyword inputs, one step a batch.

    `loss_of(outputs, batch)` takes the loss from the outputs (default: what the trace takes). `dtype` converts the
    copy and the floating inputs first. A float64 model runs under `raise_float32`. Parameters without a gradient have
    zeros in `gradients`. `model` itself stays as it is.
    """
    model = cast(copy.deepcopy(model), dtype) if dtype is not None else copy.deepcopy(model)
    optimizer = optimizer_factory(model.parameters())
    losses, gradients, norms = [], [], []
    in_double = any(parameter.dtype is torch.float64 for parameter in model.parameters())
    with written_experts(model), raise_float32() if in_double else nullcontext():
        for batch in batches:
            optimizer.zero_grad()
            batch = {name: _cast(value, dtype) for name, value in batch.items()}
            outputs = model(**batch)
            loss = loss_of(outputs, batch) if loss_of else loss_among(outputs)
            loss.backward()
            losses.append(loss.item())
            gradients.append({name: _gradient(parameter) for name, parameter in model.named_parameters()})
            limit = float("inf") if clip is None else clip
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
            optimizer.step()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    saved = model.state_dict()
    weights |= {name: b.clone() for name, b in model.named_buffers(remove_duplicate=False) if name in saved}
    return Reference(losses, gradients, norms, weights)


def _cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
