"""The main job, for any small model: plan under a budget, write the program, train it with torchrun, prove it.

Used by gpt.py and llama.py; `make demo` runs gpt.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

import autopar

PROCESSES, MEASURED_STEPS = 4, 3


def run(
    model: nn.Module, inputs: Mapping[str, Any] | None, *, budget: str, folder: Path, steps: int, **ask: Any
) -> None:
    """Everything the project promises, on four CPU processes; exits with an error if a promise is broken."""
    started = time.monotonic()
    ask = {"gpus": PROCESSES, "gpu": "cpu", "inputs": inputs, **ask}
    plain = autopar.parallelize(model, dp=PROCESSES, zero=0, recompute="none", **ask)
    result = autopar.parallelize(model, memory=budget, **ask)
    print(result, end="\n\n")
    print(result.explain(), end="\n\n")
    result.save(folder, overwrite=True)
    lines = len((folder / "model.py").read_text().splitlines())
    print(f"wrote {folder}/ (model.py: {lines} lines)\n")
    compare_memory(plain, result, folder, budget)
    print(f"\ntraining {steps} steps on the bytes of Python's standard library:")
    train(folder, steps, folder / "train.jsonl")
    parity = result.verify()
    print(f"\n{parity}\n{time.monotonic() - started:.0f} s in all")
    if not parity.holds:
        sys.exit(1)


def prove(
    model: nn.Module, inputs: Mapping[str, Any] | None, *, folder: Path, data: str, steps: int, **ask: Any
) -> None:
    """Plan, write the program, train it on CPU processes on `data`, and hold it against the model."""
    started = time.monotonic()
    result = autopar.parallelize(model, gpu="cpu", inputs=inputs, **ask)
    print(result, end="\n\n")
    result.save(folder, overwrite=True)
    print(f"wrote {folder}/; training {steps} steps on {data}:")
    log = folder / "train.jsonl"
    train(folder, steps, log, "--data", data, "--lr", "0.003", processes=result.plan.mesh.world_size)
    losses = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    print(f"loss {losses[0]:.4f} → {losses[-1]:.4f}")
    parity = result.verify(2)
    print(f"\n{parity}\n{time.monotonic() - started:.0f} s in all")
    if not parity.holds or not losses[-1] < losses[0]:
        sys.exit(1)


def compare_memory(plain: autopar.Parallelized, result: autopar.Parallelized, folder: Path, budget: str) -> None:
    """Print the measured peak live storage of plain data parallelism and of the plan: one over, one under."""
    with tempfile.TemporaryDirectory() as scratch:
        peaks = {
            "plain data parallelism": (plain, measure(plain.save(Path(scratch) / "plain"))),
            "the plan": (result, measure(folder)),
        }
    limit = result.result.request.budget_bytes
    print(f"peak live storage of a process, measured over {MEASURED_STEPS} steps (budget {budget}):")
    for name, (planned, peak) in peaks.items():
        verdict = "over" if peak > limit else "under"
        predicted = planned.estimate.peak_bytes
        print(f"  {name:24} {peak / 2**20:6.1f} MiB, {verdict} the budget (predicted {predicted / 2**20:.1f} MiB)")
    plain_peak, plan_peak = (peak for _, peak in peaks.values())
    if not plan_peak <= limit < plain_peak:
        sys.exit("the budget was to lie between the two")


def measure(folder: Path) -> float:
    """Bytes at the peak, of the process that holds most."""
    log = folder / "memory.jsonl"
    train(folder, MEASURED_STEPS, log, "--measure-memory", quiet=True)
    return max(float(json.loads(line)["memory_bytes"]) for line in log.read_text().splitlines())


def train(folder: Path, steps: int, log: Path, *options: str, quiet: bool = False, processes: int = PROCESSES) -> None:
    log.unlink(missing_ok=True)
    # The `--` keeps torchrun from reading --log as an option of its own.
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--"]
    command += [str(folder / "train.py"), "--steps", str(steps), "--log", str(log), *options]
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}  # where the examples' data sets are
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL if quiet else None, env=environment)
