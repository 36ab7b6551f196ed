"""Models that new users bring: planned once, then saved and trained as the original under each plan that is legal.

fp64, two AdamW steps, every quantity to 1e-9 on every rank. `make test` has two plans of most models, the rest is slow;
the models stand in `tests/first_hour`, by their kind.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar import parallelize
from autopar.api import Parallelized
from autopar.compile.solutions import models_of
from autopar.errors import PlanError
from autopar.search.job import illegal_sizes, search_job
from autopar.search.pins import Pins
from autopar.trace.opaque import opaque_modules
from autopar.verification.samples import inputs_of, random_batch
from autopar.verification.shrink import seeded
from tests.distributed.programs import Errors, Subject, subject, train_and_compare
from tests.first_hour.case import ALL, PLANS, Case
from tests.first_hour.table import CASES
from tests.harness import run_ranks

SAMPLES, STEPS = 8, 2
BY_NAME = {case.name: case for case in CASES}
LEGAL = [(case.name, plan) for case in CASES for plan in case.plans]
QUICK = {
    (case.name, plan)
    for i, case in enumerate(CASES)
    for j, plan in enumerate(ALL)
    if (i + j) % 3 == 0 and not case.slow
}


@cache
def planned(name: str) -> tuple[Parallelized, Subject]:
    """The model with all its placements on two GPUs, from one trace; and as a subject of parity tests."""
    case = BY_NAME[name]
    model = seeded(case.build).double()
    sequence_parallel = case.pins.get("sequence_parallel")
    result = parallelize(
        model, 2, gpu="cpu", inputs=case.inputs, global_batch=SAMPLES, precision="fp64",
        sequence_parallel=sequence_parallel,
    )  # fmt: skip
    batches = [
        random_batch(inputs_of(result.program), SAMPLES, result.job.batch.sequence, seed) for seed in range(STEPS)
    ]
    made = subject(model, torch.float64, result.program, batches)
    return replace(result, job=replace(result.job, model=made.model)), made


def with_pins(result: Parallelized, **pins: Any) -> Parallelized:
    """The best plan with these pins, of the same trace."""
    chosen = Pins(**pins)
    models = models_of(result.job, result.program, result.solutions, chosen)
    illegal = illegal_sizes(result.program, result.job, chosen)
    found = search_job(result.job, result.program, models, chosen, illegal)
    return Parallelized(result.job, result.program, result.solutions, found)


def pins_of(case: Case, plan: str) -> dict[str, Any]:
    pins = PLANS[plan] or case.pins
    return {name: value for name, value in pins.items() if name != "sequence_parallel"}


@pytest.mark.parametrize(
    ("name", "plan"), [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in LEGAL]
)
def test_trains_as_the_original(name: str, plan: str, tmp_path: Path) -> None:
    result, made = planned(name)
    result = with_pins(result, **pins_of(BY_NAME[name], plan))
    folder = result.save(tmp_path / "program")
    source, reference = (folder / "model.py").read_text(), made.reference
    opaque = opaque_modules(result.program, made.model)
    assert plan != "recompute" or "checkpoint(" in source
    found: list[Errors] = run_ranks(
        result.plan.mesh.world_size,
        lambda rank: train_and_compare(source, folder, made.batches, reference, opaque),
    )
    assert frozenset().union(*(errors.names for errors in found)) == reference.weights.keys()
    assert all(errors.worst <= 1e-9 for errors in found), found


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_verifies(name: str) -> None:
    """By the product's own `verify`, on processes that it starts."""
    result, _ = planned(name)
    assert with_pins(result, **pins_of(BY_NAME[name], ALL[0])).verify(2).holds


@pytest.mark.parametrize(
    ("name", "plan"), [(case.name, plan) for case in CASES for plan in ALL if plan not in case.plans]
)
def test_others_are_refused(name: str, plan: str) -> None:
    with pytest.raises(PlanError, match=r"the model has no list of layers|couples samples|pp=2 \(1 layer\)"):
        with_pins(planned(name)[0], **PLANS[plan])
