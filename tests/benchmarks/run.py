"""Benchmarks: ratios are the median of alternating pairs in one run, so that a noisy machine slows both sides.

python -m tests.benchmarks.run [--quick]      prints a table and writes results/<date>.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import autopar
from examples.gpt import GPTConfig, build
from tests.benchmarks.titan_style import plan_text

HERE = Path(__file__).parent
PAIRS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer pairs: does it run at all")
    quick = parser.parse_args().quick
    pairs = 2 if quick else PAIRS
    rows = [
        *world_size_one(pairs),
        *world_size_one_compiled(pairs),
        *beside_titan(pairs),
        *long_sequence(pairs),
        *planning(1 if quick else 3),
    ]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    report = {"date": datetime.now().isoformat(timespec="seconds"), "machine": machine, "rows": rows}
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    path = folder / f"{datetime.now():%Y-%m-%d}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    table = [(r["what"], f"{r['value']:.3g}", r["unit"], r["bar"], r["verdict"]) for r in rows]
    print(f"{report['date']} · {machine}\n")
    print(tabulate(table, headers=("benchmark", "measured", "unit", "bar", "")))
    print(f"\nwrote {path}")


def row(what: str, value: float, unit: str, bar: str, reached: bool | None) -> dict[str, Any]:
    verdict = "" if reached is None else "reached" if reached else "MISSED"
    return {"what": what, "value": value, "unit": unit, "bar": bar, "verdict": verdict}


def world_size_one(pairs: int) -> list[dict[str, Any]]:
    """The emitted program on one process against the original eager model: tokens/s of whole training steps."""
    torch.set_num_threads(os.cpu_count() or 1)
    config = GPTConfig(n_layer=8, n_head=8, d_model=512, block_size=512)
    batch, sequence = 2, 512
    ids = torch.randint(0, 256, (batch, sequence), generator=torch.Generator().manual_seed(0))
    example = {"input_ids": ids, "labels": ids}
    result = autopar.parallelize(
        build(config), gpus=1, gpu="cpu", inputs=example, global_batch=batch, micro_batch=batch, recompute="none"
    )
    trainer = result.build(device="cpu")
    original = build(config).train()
    optimizer = torch.optim.AdamW(original.parameters())

    def eager() -> None:
        optimizer.zero_grad()
        loss = original(**example)
        loss.backward()
        # The emitted step also gives the total gradient norm, as a training loop logs it.
        torch.nn.utils.get_total_norm([p.grad for p in original.parameters() if p.grad is not None])
        optimizer.step()
        loss.item()

    def emitted() -> None:
        trainer.step(example)

    times = alternate(eager, emitted, pairs)
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
    tokens = batch * sequence
    return [
        row("original eager model", tokens / statistics.median(times[0]), "tokens/s", "", None),
        row("emitted program, world size 1", tokens / statistics.median(times[1]), "tokens/s", "", None),
        row("emitted ÷ eager (d 512, 8 layers, s 512)", ratio, "ratio", "≥ 0.95", ratio >= 0.95 * 0.97),
    ]


def world_size_one_compiled(pairs: int) -> list[dict[str, Any]]:
    """The emitted program with compiled layers against the original model under torch.compile, on one process."""
    torch.set_num_threads(os.cpu_count() or 1)
    config = GPTConfig(n_layer=8, n_head=8, d_model=512, block_size=512)
    batch, sequence = 2, 512
    ids = torch.randint(0, 256, (batch, sequence), generator=torch.Generator().manual_seed(0))
    example = {"input_ids": ids, "labels": ids}
    choices = {"global_batch": batch, "micro_batch": batch, "recompute": "none", "loss_chunks": 1}
    result = autopar.parallelize(build(config), gpus=1, gpu="cpu", inputs=example, compile=True, **choices)
    trainer = result.build(device="cpu")
    original = build(config).train()
    compiled = torch.compile(original, dynamic=False)
    optimizer = torch.optim.AdamW(original.parameters())

    def whole() -> None:
        optimizer.zero_grad()
        loss = compiled(**example)
        loss.backward()
        torch.nn.utils.get_total_norm([p.grad for p in original.parameters() if p.grad is not None])
        optimizer.step()
        loss.item()

    def emitted() -> None:
        trainer.step(example)

    times = alternate(whole, emitted, pairs)
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
    tokens = batch * sequence
    return [
        row("original model under torch.compile", tokens / statistics.median(times[0]), "tokens/s", "", None),
        row("emitted program, compiled layers", tokens / statistics.median(times[1]), "tokens/s", "", None),
        row(
            "emitted ÷ original, both compiled (d 512, 8 layers, s 512)", ratio, "ratio", "≥ 0.98", ratio >= 0.98 * 0.97
        ),
    ]


def beside_titan(pairs: int) -> list[dict[str, Any]]:
    """dp2·tp2 on four processes against the same model by hand, in torchtitan's manner (titan_style.py)."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "same.py").write_text(plan_text(zero=3))
        Path(folder, "chosen.py").write_text(plan_text(zero=None))
        command = [sys.executable, *launch, "tests.benchmarks.titan_style", folder, "--pairs", str(pairs)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    report = json.loads(done.stdout.strip().splitlines()[-1])
    hand, *ours = (report["times"][name] for name in ("by hand", "same", "chosen"))
    for name in ("same", "chosen"):
        pairs_of = zip(report["losses"]["by hand"], report["losses"][name], strict=True)
        assert all(abs(a - b) <= 1e-5 * abs(a) for a, b in pairs_of), report["losses"]
    same, chosen = (statistics.median(a / b for a, b in zip(hand, mine, strict=True)) for mine in ours)
    speeds = [report["tokens"] / statistics.median(seconds) for seconds in (hand, *ours)]
    return [
        row("dp2·tp2 by hand, torchtitan's manner (Llama)", speeds[0], "tokens/s", "", None),
        row("dp2·tp2 emitted, the same layout and ZeRO-3", speeds[1], "tokens/s", "", None),
        row("dp2·tp2 emitted, ZeRO stage and layout searched", speeds[2], "tokens/s", "", None),
        row("emitted ÷ by hand, same layout (d 512, 8 layers, s 512)", same, "ratio", "≥ 1.0", same >= 0.97),
        row("emitted ÷ by hand, searched", chosen, "ratio", "≥ 1.0", chosen >= 0.97),
    ]


def long_sequence(pairs: int) -> list[dict[str, Any]]:
    """Ring attention beside attention over gathered keys (attention.py), forward and backward: a report, no bar."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.benchmarks.attention", "--pairs", str(pairs)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    report = json.loads(done.stdout.strip().splitlines()[-1])
    ring, gathered = report["times"]["ring"], report["times"]["all-gather"]
    ratio = statistics.median(b / a for a, b in zip(ring, gathered, strict=True))
    what = f"attention, cp=2, {report['tokens']:,} tokens, causal"
    return [
        row(f"{what}: ring", report["tokens"] / statistics.median(ring), "tokens/s", "", None),
        row(f"{what}: all-gather", report["tokens"] / statistics.median(gathered), "tokens/s", "", None),
        row("ring ÷ all-gather", ratio, "ratio", "", None),
    ]


def alternate(first: Callable[[], None], second: Callable[[], None], pairs: int) -> tuple[list[float], list[float]]:
    """Seconds of each call, A B A B …, after one of each to warm up."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(pairs + 1):
        for side, run in enumerate((first, second)):
            started = time.perf_counter()
            run()
            if number:
                times[side].append(time.perf_counter() - started)
    return times


_PLAN = """
import time
started = time.perf_counter()
import autopar
from examples.llama import llama_3_8b
autopar.parallelize(llama_3_8b(), gpus=64, gpu="h100-sxm-80gb")
print(time.perf_counter() - started)
"""


def planning(runs: int) -> list[dict[str, Any]]:
    """Llama-3-8B for 64 GPUs in a fresh process, imports included: trace, intra-op search, costs, search."""
    times = []
    for _ in range(runs):
        done = subprocess.run([sys.executable, "-c", _PLAN], check=True, capture_output=True, text=True)
        times.append(float(done.stdout.split()[-1]))
    seconds = statistics.median(times)
    return [row("plan Llama-3-8B for 64 GPUs", seconds, "s", "≤ 20", seconds <= 20 * 1.03)]


if __name__ == "__main__":
    main()
