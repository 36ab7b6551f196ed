"""Random models × random legal plans (random objectives too): nothing wrong, nothing hangs, refusals have reasons.

`make test` draws 40 by fixed seeds, `make test-all` 300 more. Everything is compared with one process in fp64.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import nn

from autopar.errors import PlanError
from autopar.plan.plan import Plan
from autopar.request import with_loss
from autopar.search.layouts import FREE, MEGATRON, MEGATRON_SP
from autopar.verification.same_draws import same_draws
from tests import models
from tests.distributed.programs import Subject, parity, subject
from tests.distributed.test_random_plans import RandomCosts
from tests.fuzz.first_hour_models import HourModel, HourSpec, hour_batch, hour_specs
from tests.fuzz.random_models import ModelSpec, RandomModel, batch_of, loss_of, model_specs

SAMPLES, SEQUENCE, STEPS = 4, 8, 2
LAYOUTS = {layout.name: layout for layout in (FREE, MEGATRON, MEGATRON_SP)}
LEAST_RUN, LEAST_HOUR_RUN = 0.7, 0.4


@dataclass(frozen=True)
class PlanSpec:
    """A plan in words; `layers` of the model decide which stages and recomputed layers it has."""

    mesh: tuple[int, int, int]  # pp, dp, tp
    layout: str
    objective: int | None  # the seed of random costs; None: the cost model's
    micro_batch: int
    zero: int
    recompute: bool
    schedule: str


def plan_specs() -> st.SearchStrategy[PlanSpec]:
    meshes = ((1, 1, 2), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1), (3, 1, 1), (1, 1, 3))
    return st.builds(
        PlanSpec,
        mesh=st.sampled_from(meshes),
        layout=st.sampled_from(sorted(LAYOUTS)),
        objective=st.none() | st.integers(0, 10**6),
        micro_batch=st.sampled_from((1, 2)),
        zero=st.integers(0, 3),
        recompute=st.booleans(),
        schedule=st.sampled_from(("gpipe", "1f1b")),
    )


def subject_of(spec: ModelSpec) -> Subject:
    dtype = torch.float64
    model: nn.Module = models.seeded(lambda: RandomModel(spec), meta=False)
    data = [batch_of(spec, SAMPLES, SEQUENCE, step, dtype) for step in range(STEPS)]
    inputs = {name: value[:2] for name, value in data[0].items()}
    if spec.output == "logits":
        model = with_loss(model, lambda logits, batch: loss_of(spec, logits, batch["labels"]), inputs)
    return subject(model, dtype, models.layered(model, inputs, dtype), data)


def plan_of(made: Subject, spec: PlanSpec) -> Plan:
    pp, dp, tp = spec.mesh
    pp = min(pp, len(made.program.layer_calls))
    enough = SAMPLES // dp // spec.micro_batch >= pp  # 1F1B needs a micro-batch for each stage
    return made.plan(
        pp,
        dp,
        tp,
        layout=LAYOUTS[spec.layout],
        costs=None if spec.objective is None else RandomCosts(spec.objective),
        micro_batch=spec.micro_batch,
        recompute="all" if spec.recompute else (),
        schedule=spec.schedule if enough else "gpipe",
        global_batch=SAMPLES,
        sequence=SEQUENCE,
        zero=spec.zero,
    )


def hour_subject(spec: HourSpec) -> Subject:
    model = models.seeded(lambda: HourModel(spec, SEQUENCE), meta=False)
    data = [hour_batch(spec, SAMPLES, SEQUENCE, step) for step in range(STEPS)]
    inputs = {name: value[:2] for name, value in data[0].items()}
    return subject(model, torch.float64, models.layered(model, inputs, torch.float64), data)


def fuzz(examples: int, seed_: int, hour: bool = False) -> tuple[int, Counter[str]]:
    """How many ran, all of them exact, and how many were refused for which reason. hour: models of the first hour."""
    ran = 0
    refused: Counter[str] = Counter()

    @seed(seed_)
    @settings(
        max_examples=examples, deadline=None, database=None, phases=[Phase.generate], report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(hour_specs() if hour else model_specs(), plan_specs())
    def one(model: ModelSpec | HourSpec, plan: PlanSpec) -> None:
        nonlocal ran
        try:
            made = hour_subject(model) if isinstance(model, HourSpec) else subject_of(model)
            chosen = plan_of(made, plan)
            made.source(chosen)
        except PlanError as error:
            refused[_reason(error)] += 1
            return
        noisy = isinstance(model, HourSpec) and model.noise != "none"
        with same_draws() if noisy else nullcontext():  # which the forked ranks are in, too
            errors = parity(made, chosen, timeout=90)
        assert errors.worst <= 1e-9, errors
        ran += 1

    one()
    return ran, refused


def _reason(error: PlanError) -> str:
    """The kind of the refusal: its class, and its message without names, numbers and places."""
    text = re.sub(r"\(.*?\)|[\w.]*[._\d][\w.]*", "…", str(error).splitlines()[0])
    return f"{type(error).__name__}: {text[:90]}"


def check(examples: int, seed_: int, hour: bool = False) -> None:
    ran, refused = fuzz(examples, seed_, hour)
    listing = "\n".join(f"  {n} × {reason}" for reason, n in refused.most_common())
    print(f"{ran} random models ran exactly, {refused.total()} were refused:\n{listing}")
    assert ran >= (LEAST_HOUR_RUN if hour else LEAST_RUN) * (ran + refused.total()), listing


@pytest.mark.parametrize("group", range(4))
def test_random_models(group: int) -> None:
    check(10, group)


@pytest.mark.parametrize("group", range(2))
def test_random_models_of_the_first_hour(group: int) -> None:
    check(5, 200 + group, hour=True)


@pytest.mark.slow
@pytest.mark.parametrize("group", range(10))
def test_many_random_models_of_the_first_hour(group: int) -> None:
    check(30, 300 + group, hour=True)


@pytest.mark.slow
@pytest.mark.parametrize("group", range(10))
def test_many_random_models(group: int) -> None:
    check(30, 100 + group)
