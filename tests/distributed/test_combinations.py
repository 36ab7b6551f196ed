"""Every choice with every other: each combination trains as one process does, or is refused with a reason.

Drawn from the product by a fixed seed: 30 in `make test`, 160 more in `make test-all`.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from autopar.errors import PlanError
from autopar.plan.plan import Plan, Solution
from autopar.runtime import compiled
from autopar.runtime.choices import Mesh
from autopar.search.layouts import ALL_GATHER, MEGATRON, MEGATRON_SP, RING, ULYSSES
from tests import models
from tests.distributed.half import assert_half
from tests.distributed.programs import (
    OPTIMIZERS,
    SEQUENCE,
    TOLERANCE,
    Subject,
    batches,
    parity,
    recomputed,
    stages,
    subject,
)

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CONTEXTS = {"ring": RING, "ulysses": ULYSSES, "all_gather": ALL_GATHER}
LAYOUTS = {"megatron": MEGATRON, "megatron-sp": MEGATRON_SP}
GROUP = 10  # combinations of one test
REFUSED = 5  # one in so many may be one that no plan can be
LARGEST, STEPS, SAMPLES, LAYERS = 8, 2, 4, 4

# What may be chosen together; the precisions that show a fault best come most often.
CHOICES: dict[str, tuple[Any, ...]] = {
    "schedule": (
        *(("none", 1), ("none", 1), ("none", 1), ("gpipe", 1), ("1f1b", 1)),
        *(("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2)),
    ),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "all", "attention core, mlp", "groups of 2", "attention"),
    "context": ("", "", "ring", "ulysses", "all_gather"),
    "layout": ("", "megatron", "megatron-sp"),
    "precision": ("fp64", "fp64", "fp64", "fp32", "bf16", "fp16"),
    "dp": (1, 1, 2, 2, 2, 4),
    "hsdp": (None, None, None, 2),
    "compile": (*[False] * 14, True),
    "reduce_dtype": (None, None, "half"),  # where there is one; else that of the masters, which is the same
    "loss_chunks": (1, 1, 3),
    "offload": (False, False, False, True),
    "micro_batch": (1, 2),
}
# Why a combination may be refused: the rules of legality, by a word of their reasons.
REFUSALS = {
    "zero-bubble": "zero-bubble with ZeRO 2 and 3, with recompute, or compiled",
    "interleaved": "micro-batches that pp does not divide",
    "1f1b needs": "fewer micro-batches than stages",
    "hsdp": "groups of what is not sharded, or of too few ranks",
    "offload": "offload without sharded parameters",
    "global_batch": "more samples at once than there are",
    "zero=": "nothing to shard",
    "a group, but on two stages": "groups over the stages' bounds",
    "twice": "recompute that the schedule would run twice",
    "loss_chunks": "a head whose vocabulary cannot be cut",
}


@dataclass(frozen=True)
class Case:
    """One combination, in the words of `CHOICES`."""

    number: int
    chosen: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.number}: " + ", ".join(f"{name}={value}" for name, value in self.chosen.items())


def cases(count: int, seed: int) -> list[Case]:
    """Different combinations on at most 8 processes, the schedules in turn, few of choices that exclude each other."""
    drawn, found, refused = random.Random(seed), list[Case](), 0
    schedules = CHOICES["schedule"]
    while len(found) < count:
        chosen = {name: drawn.choice(values) for name, values in CHOICES.items()}
        chosen["schedule"] = schedules[len(found) % len(schedules)]
        doubled = (chosen["schedule"][0] != "none", chosen["context"] != "", chosen["layout"] != "")
        if not 1 < chosen["dp"] * 2 ** sum(doubled) <= LARGEST or any(chosen == case.chosen for case in found):
            continue
        excluded = not _is_plan(chosen)
        if not excluded or refused * REFUSED < len(found):
            found.append(Case(len(found), chosen))
            refused += excluded
    return found


@cache
def small(precision: str) -> Subject:
    """examples/gpt.py with four layers, tied embeddings, and heads for tp and cp at once."""
    model, program = models.gpt(DTYPES[precision], n_layer=LAYERS, d_model=32, n_head=4)
    made = subject(model, DTYPES[precision], program)
    return replace(made, data=tuple(batches(STEPS, samples=SAMPLES)))


def _is_plan(chosen: dict[str, Any]) -> bool:
    try:
        return bool(unsolved(chosen))
    except PlanError:
        return False


def unsolved(chosen: dict[str, Any]) -> Plan:
    """The plan without placements. PlanError where it is none."""
    schedule, virtual_stages = chosen["schedule"]
    precision, pp = chosen["precision"], 1 if schedule == "none" else 2
    return Plan.of(
        mesh=Mesh(pp=pp, dp=chosen["dp"], cp=2 if chosen["context"] else 1, tp=2 if chosen["layout"] else 1),
        global_batch=SAMPLES,
        micro_batch=chosen["micro_batch"],
        sequence=SEQUENCE,
        stages=stages(LAYERS, pp * virtual_stages),
        schedule=schedule,
        zero=chosen["zero"],
        hsdp=chosen["hsdp"],
        offload=chosen["offload"],
        recompute=recomputed(() if chosen["recompute"] == "none" else chosen["recompute"], LAYERS),
        precision=precision,
        optimizer=OPTIMIZERS[precision],
        loss_chunks=chosen["loss_chunks"],
        compile=chosen["compile"],
        reduce_dtype=precision if chosen["reduce_dtype"] else None,
        context=Solution(2 if chosen["context"] else 1, {}, chosen["context"]),
    )


def planned(case: Case) -> Plan:
    chosen, made = case.chosen, small(case.chosen["precision"])
    plan = unsolved(chosen)
    plan = plan.changed(context=made.context(plan, CONTEXTS.get(chosen["context"], RING)))
    return plan.changed(solution=made.solution(plan, LAYOUTS.get(chosen["layout"], MEGATRON)))


def outcome(case: Case) -> str:
    """ "ok", or the kind of the refusal; raises where the program computes something else."""
    made = small(case.chosen["precision"])
    try:
        plan = planned(case)
        made.source(plan)
    except PlanError as error:
        kinds = [kind for word, kind in REFUSALS.items() if word in str(error)]
        assert kinds, f"{case}: refused for no reason that the list has: {error}"
        return kinds[0]
    if case.chosen["precision"] in ("bf16", "fp16"):
        assert_half(made, plan)
    else:
        errors = parity(made, plan)
        assert errors.worst <= TOLERANCE[made.precision], f"{case}: {errors}"
    return "ok"


def run(chosen: list[Case]) -> Counter[str]:
    found: Counter[str] = Counter()
    for case in chosen:
        try:
            found[outcome(case)] += 1
        except Exception as error:
            error.add_note(str(case))
            raise
    print(f"{found['ok']} of {found.total()} ran; refused: {dict(found - Counter(ok=found['ok']))}")
    return found


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled layers are graphs run by torch's own kernels: C++ takes half a minute to compile (test_compile.py)."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")


@pytest.mark.parametrize("group", range(3))
def test_some_combinations(group: int) -> None:
    assert run(cases(30, seed=0)[group * GROUP :][:GROUP])["ok"] >= GROUP // 2


@pytest.mark.slow
@pytest.mark.parametrize("group", range(16))
def test_many_combinations(group: int) -> None:
    assert run(cases(160, seed=1)[group * GROUP :][:GROUP])["ok"] >= GROUP // 2
