"""The report of each step: a JSON line in a file, and a line of progress."""

from __future__ import annotations

import json
import shutil
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from .memory import LiveStorage
from .mesh import Mesh
from .settings import Settings
from .trainer import StepResult

_BAR = 20  # characters
Record = dict[str, float | None]
_NOTABLE = 0.02  # of a step's time, from which on loading is shown


class Meter:
    """Times steps, measures their memory and writes them down on rank 0.

    memory_bytes is the largest peak of any rank: the allocator's on a GPU; live storage on a CPU, and only
    with `measure_memory`, for counting slows every op.
    """

    def __init__(self, log: Path | None, measure_memory: bool = False) -> None:
        self._log, self._start, self._data_s = log, 0.0, 0.0
        self._storage = LiveStorage() if measure_memory else None
        # To be entered before the model is built: what is not seen to be allocated is not counted.
        self.counting: AbstractContextManager[object] = self._storage or nullcontext()

    def start(self) -> None:
        """Start the clock of a step, before its samples are loaded: loading is part of its time."""
        if self._storage:
            self._storage.reset()
        elif torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._start = time.perf_counter()

    def loaded(self) -> None:
        """Note how long the samples took to load."""
        self._data_s = time.perf_counter() - self._start

    def stop(self, step: int, result: StepResult, mesh: Mesh, steps: range) -> None:
        """Every rank calls, once `result` is a number: the device has done the step, one of `steps`, or nearly."""
        if mesh.device.type == "cuda":
            torch.cuda.synchronize()
        time_s = time.perf_counter() - self._start
        record = _record(step, result, time_s, self._data_s, self._memory(mesh), mesh.settings)
        if dist.get_rank() == 0:
            unit = "tokens" if mesh.settings.sequence > 1 else "samples"  # images have no sequence
            place = "GPU" if mesh.device.type == "cuda" else "process"
            show(_progress(record, f"{unit}/s/{place}"), step, range(steps.start, step + 1) if result.stop else steps)
            if self._log:
                with self._log.open("a") as file:
                    print(json.dumps(record), file=file)

    def _memory(self, mesh: Mesh) -> int | None:
        if mesh.device.type != "cuda" and not self._storage:
            return None
        peak = self._storage.peak if self._storage else torch.cuda.max_memory_allocated()
        largest = torch.tensor(peak, device=mesh.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)


def _record(
    step: int, result: StepResult, time_s: float, data_s: float, memory: int | None, settings: Settings
) -> Record:
    """The log's entry of a step. data_s: the part of time_s in which its samples were loaded."""
    flops, peak_flops = settings.flops_per_step, settings.peak_flops
    mfu = flops / (time_s * peak_flops * settings.world_size) if flops and peak_flops else None
    return {
        "step": step,
        "loss": result.loss,
        "grad_norm": None if result.skipped else result.grad_norm,
        "tokens_per_s_per_gpu": settings.global_batch * settings.tokens / (time_s * settings.world_size),
        "mfu": mfu,
        "memory_bytes": memory,
        "measured_step_s": time_s,
        "data_s": data_s,
        "predicted_step_s": settings.predicted_step_s,
        **({"loss_scale": result.loss_scale, "skipped": result.skipped} if settings.precision == "fp16" else {}),
    }


def show(text: str, step: int, steps: range) -> None:
    """Print a line a step; on a terminal, a bar of the steps and the line, over those of the step before."""
    if not sys.stdout.isatty():
        print(text, flush=True)
        return
    done = step - steps.start + 1
    full = _BAR * done // len(steps)
    line = f"{'█' * full}{'░' * (_BAR - full)} {done} of {len(steps)} · {text}"
    width = shutil.get_terminal_size().columns - 1  # a longer line would wrap, and not be drawn over
    print(f"\r\x1b[2K{line[:width]}", end="\n" if done == len(steps) else "", flush=True)


def _size(size_bytes: float) -> str:
    """71.20 GiB; MiB below one."""
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.1f} MiB"


def _progress(record: Record, unit: str) -> str:
    time_s, predicted = record["measured_step_s"] or 0.0, record["predicted_step_s"]
    parts = [
        f"step {record['step']}",
        f"loss {record['loss']:.4f}",
        f"grad norm {record['grad_norm']:.3f}" if record["grad_norm"] is not None else "skipped: gradients overflow",
        f"loss scale {record['loss_scale']:,g}" if "loss_scale" in record else "",
        f"{record['tokens_per_s_per_gpu']:,.0f} {unit}",
        f"MFU {record['mfu']:.1%}" if record["mfu"] is not None else "",
        _size(record["memory_bytes"]) if record["memory_bytes"] is not None else "",
        f"{time_s:.3f} s" + (f" (predicted {predicted:.3f}, ×{time_s / predicted:.2f})" if predicted else ""),
        f"data {data_s:.3f} s" if (data_s := record["data_s"] or 0.0) > _NOTABLE * time_s else "",
    ]
    return " · ".join(part for part in parts if part)
