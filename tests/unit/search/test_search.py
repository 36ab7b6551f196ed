"""The search against brute force on small spaces; errors, pins, the table."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.hardware import GIB, Cluster
from autopar.cost_models.layer_costs import ModelCosts
from autopar.cost_models.step_time import estimate
from autopar.errors import InfeasibleError, PlanError
from autopar.plan import Plan
from autopar.search.explain import explain, plan_table
from autopar.search.search import SearchResult, search
from autopar.search.space import Choice, Pins, Request, enumerate_space
from autopar.search.stages import StageCosts
from tests.unit.cost_models.fabricate import model

LAYERS, SEQUENCE = 4, 2048


def small(tp: int, classes: int = 1) -> ModelCosts:
    return model(layers=LAYERS, hidden=2048, ffn=8192, vocabulary=32000, tp=tp, classes=classes)


def llama(tps: tuple[int, ...] = (1, 2, 4, 8)) -> dict[int, list[ModelCosts]]:
    return {tp: [model(tp=tp)] for tp in tps}


def recomputed(ranges: tuple[tuple[int, int], ...]) -> list[tuple[int, ...]]:
    """Every subset of the layers."""
    layers = range(ranges[-1][1])
    return [subset for count in range(len(layers) + 1) for subset in combinations(layers, count)]


def splits(layers: int, stages: int) -> list[tuple[tuple[int, int], ...]]:
    cuts = combinations(range(1, layers), stages - 1)
    return [tuple(zip((0, *cut), (*cut, layers), strict=True)) for cut in cuts]


def brute_force(cost: ModelCosts, choice: Choice, request: Request, cluster: Cluster) -> float:
    """Least step over all recompute sets and all splits whose slowest stage is least; inf if nothing fits."""
    best = (inf, inf, inf)
    for ranges in splits(LAYERS, choice.mesh.pp):
        for subset in recomputed(ranges):
            plan = Plan(
                choice.mesh,
                request.global_batch,
                choice.micro_batch,
                SEQUENCE,
                ranges,
                choice.schedule,
                choice.zero,
                subset,
            )
            result = estimate(cost, plan, cluster)
            if result.peak_bytes > request.budget_bytes:
                continue
            slowest = max(_steady_s(cost, plan, request, cluster))
            best = min(best, (round(slowest, 9), result.peak_bytes, result.step_time_s))
    return best[2]


def _steady_s(cost: ModelCosts, plan: Plan, request: Request, cluster: Cluster) -> list[float]:
    """Seconds of a micro-batch on each stage, as the boundaries' dynamic program counts them."""
    from autopar.cost_models.compute import price_model

    price = price_model(cost, [plan.micro_batch], SEQUENCE, cluster.hardware, "bf16")[0]
    pinned = replace(request, budget_bytes=inf, pins=Pins(recompute=plan.recompute))
    choice = Choice(plan.mesh, plan.micro_batch, plan.accumulation, plan.schedule, plan.zero)
    costs = StageCosts(choice, price, pinned, cluster.hardware)
    return [costs(stage, *at)[0] for stage, at in enumerate(plan.stages)]


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([2, 4]),
    st.floats(6.0, 30.0),
    st.integers(1, 2),
    st.sampled_from(["h100-sxm-80gb", "l40s-48gb"]),
)
def test_it_finds_what_brute_force_finds(gpus: int, budget_gib: float, classes: int, gpu: str) -> None:
    cluster = Cluster(gpus, gpu)
    pins = Pins(forbid={"micro_batch": (8, 4)})
    request = Request(8, SEQUENCE, budget_gib * GIB, pins=pins)
    costs = {tp: small(tp, classes) for tp in (1, 2)}
    space = enumerate_space(request, cluster, LAYERS, costs.keys(), {})
    steps = [brute_force(costs[choice.mesh.tp], choice, request, cluster) for choice in space.choices]
    models = {tp: [cost] for tp, cost in costs.items()}
    try:
        found = search(models, cluster, global_batch=8, sequence=SEQUENCE, budget_bytes=budget_gib * GIB, pins=pins)
    except InfeasibleError:
        assert min(steps) == inf
        return
    assert found.chosen.estimate.step_time_s == pytest.approx(min(steps), rel=1e-3)
    assert found.chosen.estimate.peak_bytes <= budget_gib * GIB * (1 + 1e-9)


def find(**arguments: object) -> SearchResult:
    defaults: dict[str, object] = {"global_batch": 512, "sequence": 8192}
    return search(llama(), Cluster(64), **{**defaults, **arguments})  # type: ignore[arg-type]


def test_llama_on_64_gpus_is_planned_in_seconds() -> None:
    for budget_gib in (79, 40, 20):
        result = find(budget_bytes=budget_gib * GIB)
        assert result.elapsed_s < 10  # 3 s on an idle machine
        assert all(c.estimate.peak_bytes <= budget_gib * GIB for c in result.best)
        steps = [c.estimate.step_time_s for c in result.best]
        assert steps == sorted(steps) and len({str(c.plan.mesh) for c in result.best}) == len(steps)
        assert result.chosen.plan.mesh.world_size == 64


def test_less_memory_is_no_faster() -> None:
    steps = [find(budget_bytes=gib * GIB).chosen.estimate.step_time_s for gib in (79, 50, 30, 20)]
    assert steps == sorted(steps)


def test_the_better_solution_of_a_size_is_chosen() -> None:
    slow = replace(model(tp=2), solution="slow", prologue=replace(model(tp=2).prologue, ops=model().prologue.ops * 50))
    result = search({2: [slow, model(tp=2)]}, Cluster(16), global_batch=64, sequence=8192, pins=Pins(tp=2))
    assert {c.model.solution for c in result.best} == {"megatron"}


def test_pinned_recompute_is_kept() -> None:
    pinned = {"pp": 2, "tp": 2, "dp": 16}
    for recompute, expected in (("none", 0), ("full", 32), (3, 6), ((1, 30), 2)):
        result = find(pins=Pins(recompute=recompute, **pinned))  # type: ignore[arg-type]
        assert len(result.chosen.plan.recompute) == expected
    assert result.chosen.plan.recompute == (1, 30)


def test_fewer_gpus_are_said_aloud() -> None:
    models = {1: [small(1)]}
    result = search(models, Cluster(7), global_batch=8, sequence=SEQUENCE)
    used = result.chosen.plan.mesh.world_size
    assert used < 7 and result.notes[0].startswith(f"uses {used} of 7 GPUs: no legal plan that fits uses all 7")


def test_too_small_a_budget_names_the_nearest_plan_and_the_shortfall() -> None:
    with pytest.raises(InfeasibleError, match=r"no plan fits 10.0 GiB a GPU: the nearest \(.*needs .* too much"):
        search(llama(), Cluster(2), global_batch=64, sequence=8192, budget_bytes=10 * GIB)


def test_unknown_optimizers_are_refused_before_the_search() -> None:
    from autopar.plan import Optimizer

    with pytest.raises(PlanError, match="LBFGS"):
        find(optimizer=Optimizer("LBFGS"))


def test_the_table_and_the_ledger() -> None:
    result = find(budget_bytes=40 * GIB, illegal_tp={24: "32 heads"})
    table = plan_table(result, "LlamaForCausalLM", 8_030_261_248)
    first = table.splitlines()[0]
    assert first == (
        "LlamaForCausalLM · 8.03 B parameters · 64 × H100-SXM-80GB (8 nodes × 8) · "
        "512 × 8,192 tokens a step · bf16 · AdamW · budget 40.0 GiB a GPU"
    )
    assert "not legal: tp=24 (32 heads), pp=64 (32 layers)" in table
    assert len(table.splitlines()) == 3 + len(result.best) + 1
    text = explain(result)
    assert "stage 0 (layers 0–" in text and "why not" in text and "activations: " in text
    # The ledgers add up to what the table says.
    for stage in result.chosen.estimate.stages:
        assert stage.peak_bytes == pytest.approx(sum(term.size_bytes for term in stage.memory))
