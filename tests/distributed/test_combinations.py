"""Every choice with every other: each combination trains as one process does, or is refused with a reason.

Drawn from the product by a fixed seed: 30 in `make test`, 170 more in `make test-all`.
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
from autopar.plan import Plan
from autopar.search.layouts import ALL_GATHER, MEGATRON, MEGATRON_SP, RING, ULYSSES
from tests import models
from tests.distributed.half import assert_half
from tests.distributed.programs import TOLERANCE, Subject, batches, parity, subject

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CONTEXTS = {"ring": RING, "ulysses": ULYSSES, "all_gather": ALL_GATHER}
LAYOUTS = {"megatron": MEGATRON, "megatron-sp": MEGATRON_SP}
GROUP = 10  # combinations of one test
LARGEST, STEPS, SAMPLES = 8, 2, 4

# What may be chosen together; the precisions that show a fault best come most often.
CHOICES: dict[str, tuple[Any, ...]] = {
    "schedule": (("none", 1), ("none", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "all", "attention core, mlp", "groups of 2", "attention"),
    "context": ("", "", "ring", "ulysses", "all_gather"),
    "layout": ("", "megatron", "megatron-sp"),
    "precision": ("fp64", "fp64", "fp64", "fp32", "bf16", "fp16"),
    "dp": (1, 2, 2),
    "loss_chunks": (1, 1, 3),
    "offload": (False, False, False, True),
    "micro_batch": (1, 2),
}
# Why a combination may be refused: the rules of legality, by a word of their reasons.
REFUSALS = {
    "zero-bubble": "zero-bubble with ZeRO 2 and 3, or with recompute",
    "interleaved": "micro-batches that pp does not divide",
    "1f1b needs": "fewer micro-batches than stages",
    "offload": "offload without sharded parameters",
    "zero=": "nothing to shard",
    "groups": "groups over the stages' bounds",
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
    """Different combinations on at most 8 processes."""
    drawn, found = random.Random(seed), list[Case]()
    while len(found) < count:
        chosen = {name: drawn.choice(values) for name, values in CHOICES.items()}
        doubled = (chosen["schedule"][0] != "none", chosen["context"] != "", chosen["layout"] != "", chosen["dp"] > 1)
        if 1 < 2 ** sum(doubled) <= LARGEST and all(chosen != case.chosen for case in found):
            found.append(Case(len(found), chosen))
    return found


@cache
def small(precision: str) -> Subject:
    """examples/gpt.py with four layers, tied embeddings, and heads for tp and cp at once."""
    model, program = models.gpt(DTYPES[precision], n_layer=4, d_model=32, n_head=4)
    made = subject(model, DTYPES[precision], program)
    return replace(made, data=tuple(batches(STEPS, samples=SAMPLES)))


def planned(case: Case) -> Plan:
    chosen = case.chosen
    schedule, virtual_stages = chosen["schedule"]
    plan = small(chosen["precision"]).plan(
        pp=1 if schedule == "none" else 2,
        dp=chosen["dp"],
        cp=2 if chosen["context"] else 1,
        tp=2 if chosen["layout"] else 1,
        context=CONTEXTS.get(chosen["context"], RING),
        layout=LAYOUTS.get(chosen["layout"], MEGATRON),
        schedule=schedule,
        virtual_stages=virtual_stages,
        zero=chosen["zero"],
        recompute=() if chosen["recompute"] == "none" else chosen["recompute"],
        micro_batch=chosen["micro_batch"],
        global_batch=SAMPLES,
        offload=chosen["offload"],
    )
    return replace(plan, loss_chunks=chosen["loss_chunks"])


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


@pytest.mark.parametrize("group", range(3))
def test_some_combinations(group: int) -> None:
    assert run(cases(30, seed=0)[group * GROUP :][:GROUP])["ok"] >= GROUP // 2


@pytest.mark.slow
@pytest.mark.parametrize("group", range(17))
def test_many_combinations(group: int) -> None:
    assert run(cases(170, seed=1)[group * GROUP :][:GROUP])["ok"] >= GROUP // 2
