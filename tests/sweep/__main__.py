"""Every Hugging Face class of a few kinds, small: planned, refused by reason, or crashed.

python -m tests.sweep [--draw N] [--seed S] [--only NAME …] [--jobs 2] [--interpret 60] [--processes 12] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from tests.sweep.attempt import CRASHED, OWN, PLANNED, REFUSED, Outcome, attempt, silent

KINDS = ("CausalLM", "MaskedLM", "SequenceClassification", "ImageClassification", "ConditionalGeneration")
_TIMEOUT_S = 300.0


def classes() -> dict[str, str]:
    """Name → kind of the classes of transformers that are swept."""
    import transformers

    found = {}
    for name in sorted(dir(transformers)):
        kind = next((k for k in KINDS if name.endswith(f"For{k}")), None)
        if kind and not name.startswith("Auto"):
            found[name] = kind
    return found


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", type=int, help="so many classes, drawn by seed; all without it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="these classes, or kinds")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--interpret", type=int, default=60)
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--timeout", type=float, default=_TIMEOUT_S)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results.json")
    options = parser.parse_args()
    kinds = classes()
    names = [n for n, k in kinds.items() if not options.only or n in options.only or k in options.only]
    drawn = random.Random(options.seed)
    if options.draw is not None:
        names = sorted(drawn.sample(names, min(options.draw, len(names))))
    compared = drawn.sample(names, min(options.interpret, len(names)))
    trained = drawn.sample(compared, min(options.processes, len(compared)))
    outcomes = run(names, set(compared), set(trained), options.jobs, options.timeout, options.out)
    print(summary(outcomes, kinds))


def run(names: list[str], compared: set[str], trained: set[str], jobs: int, timeout: float, out: Path) -> list[Outcome]:
    """Each class in a forked child; what is known so far is in `out` at any time."""
    import transformers  # noqa: F401 - once, before the forks

    waiting, outcomes = list(names), list[Outcome]()
    running: dict[str, Any] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            running[name] = _start(name, name in compared, name in trained)
        wait([receiver for _, receiver, _ in running.values()], timeout=1.0)
        for name, (process, receiver, begin) in list(running.items()):
            outcome = _ended(name, process, receiver, begin, timeout)
            if outcome is not None:
                del running[name]
                outcomes.append(outcome)
                out.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")
                first = outcome.reason.split("\n")[0][:150]
                print(f"{len(outcomes)}/{len(names)} {name}: {outcome.outcome} {outcome.at} {first}", flush=True)
    return outcomes


def _start(name: str, compared: bool, trained: bool) -> Any:
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(sender, name, compared, trained))
    process.start()
    sender.close()
    return process, receiver, time.monotonic()


def _child(sender: Connection, name: str, compared: bool, trained: bool) -> None:
    os.setpgrp()  # with the processes that it starts
    with silent():
        sender.send(attempt(name, compared, trained))


def _ended(name: str, process: Any, receiver: Connection, begin: float, timeout: float) -> Outcome | None:
    seconds = time.monotonic() - begin
    if receiver.poll():
        try:
            outcome: Outcome = receiver.recv()
            process.join()
            return outcome
        except EOFError:
            process.join()
            return Outcome(name, CRASHED, "", f"died with exit code {process.exitcode}", "", seconds)
    if seconds > timeout:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        return Outcome(name, CRASHED, "", f"not done after {timeout:.0f} s", "", seconds)
    return None


def summary(outcomes: list[Outcome], kinds: dict[str, str]) -> str:
    """The table by kind, then each refusal and crash with what it says."""
    rows = []
    for kind in KINDS:
        counts = Counter(o.outcome for o in outcomes if kinds[o.name] == kind)
        runs = sum(counts.values()) - counts[OWN]
        share = f"{counts[PLANNED] / runs:.0%}" if runs else "–"
        rows.append((f"*For{kind}", runs, counts[PLANNED], share, counts[REFUSED], counts[CRASHED], counts[OWN]))
    heads = ("classes", "run", "planned", "", "refused", "crashed", "own forward fails")
    table = tabulate(rows, headers=heads, tablefmt="github")
    failed = [o for o in outcomes if o.outcome in (REFUSED, CRASHED)]
    reasons = (f"{o.outcome} at {o.at}: {o.name}: {o.reason}" for o in sorted(failed, key=lambda o: o.reason))
    return "\n".join([table, "", *reasons, ""])


if __name__ == "__main__":
    main()
