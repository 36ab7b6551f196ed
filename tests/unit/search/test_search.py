"""The search against brute force on small spaces; errors, pins, the table."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import combinations, product
from math import inf

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from autopar.api import parallelize
from autopar.cost_models.compute import ModelPrice, StageShape, price_model, stage_shape, stage_time
from autopar.cost_models.data_parallel import data_time
from autopar.cost_models.hardware import GIB, Cluster, Hardware
from autopar.cost_models.layer_costs import ModelCosts
from autopar.cost_models.memory import host_room_bytes
from autopar.cost_models.stage_context import stage_context_of
from autopar.cost_models.step_time import estimate_price
from autopar.errors import InfeasibleError, PlanError
from autopar.plan.plan import Optimizer, Plan
from autopar.plan.recompute import RecomputeChoice, by_layer, recompute_choices, whole_layers
from autopar.search.explain import explain, plan_table
from autopar.search.pins import Pins, Request
from autopar.search.search import SearchResult
from autopar.search.space import Choice, enumerate_space
from tests.unit.cost_models.fabricate import model
from tests.unit.search.requests import request, search

LAYERS, SEQUENCE = 4, 2048
GPUS = ["h100-sxm-80gb", "l40s-48gb"]


def small(tp: int, classes: int = 1) -> ModelCosts:
    return model(layers=LAYERS, hidden=2048, ffn=8192, vocabulary=32000, tp=tp, classes=classes)


def llama(tps: tuple[int, ...] = (1, 2, 4, 8)) -> list[ModelCosts]:
    return [model(tp=tp) for tp in tps]


def recomputes(layers: int) -> list[tuple[str, ...]]:
    """Every choice of recompute for each layer."""
    return list(product(("", "activation", "layer"), repeat=layers))


def splits(layers: int, stages: int) -> list[tuple[tuple[int, int], ...]]:
    cuts = combinations(range(1, layers), stages - 1)
    return [tuple(zip((0, *cut), (*cut, layers), strict=True)) for cut in cuts]


def brute_force(price: ModelPrice, choice: Choice, asked: Request, hardware: Hardware) -> float:
    """Seconds of a step, over all recompute sets and all splits, of the plan whose slowest rank takes least."""
    best = (inf, inf, inf)
    seen = set()
    stages = choice.mesh.pp * choice.virtual_stages
    for ranges, chosen in product(splits(LAYERS, stages), recomputes(LAYERS)):
        recompute = recompute_choices({layer: what for layer, what in enumerate(chosen) if what})
        shapes = tuple(stage_shape(price, start, stop, recompute) for start, stop in ranges)
        if shapes in seen or not all(map(two_kinds, shapes)) or (recompute and choice.schedule == "zero-bubble"):
            continue
        seen.add(shapes)
        plan = Plan.of(
            choice.mesh,
            asked.batch.global_batch,
            choice.batch.micro_batch,
            SEQUENCE,
            ranges,
            choice.schedule,
            zero=choice.sharding.zero,
            recompute=recompute,
            hsdp=choice.sharding.hsdp,
            offload=choice.sharding.offload,
        )
        result = estimate_price(price, plan, hardware)
        host_bytes = max(stage.host_bytes for stage in result.stages)
        if result.peak_bytes <= asked.budget_bytes and host_bytes <= host_room_bytes(hardware):
            slowest_s = max(steady_s(price, plan, hardware))
            best = min(best, (round(slowest_s, 9), result.peak_bytes, result.step_time_s))
    return best[2]


def two_kinds(shape: StageShape) -> bool:
    """Whether the layers of each class of a stage take two choices at most, "nothing" being one."""
    return all(
        len(own) + (sum(n for _, n in own) < count) <= 2
        for own, count in zip(shape.recomputed, shape.counts, strict=True)
    )


def steady_s(price: ModelPrice, plan: Plan, hardware: Hardware) -> list[float]:
    """Seconds of one micro-batch on each rank, without what happens once a step."""
    shapes = [stage_shape(price, start, stop, plan.activations.recompute) for start, stop in plan.pipeline.stages]
    context = stage_context_of(plan, hardware)
    data = [data_time(price, shape, context) for shape in shapes]
    stages = [
        stage_time(price, shape, context.splits_backward).total_s
        + comm.each_forward.exposed_s
        + comm.each_backward.exposed_s
        for shape, comm in zip(shapes, data, strict=True)
    ]
    return [sum(stages[rank :: plan.mesh.pp]) for rank in range(plan.mesh.pp)]


SPACES = (st.sampled_from([2, 4]), st.floats(6.0, 30.0), st.integers(1, 2), st.sampled_from(GPUS))


@settings(max_examples=1, deadline=None, phases=[Phase.generate], derandomize=True)
@given(*SPACES)
def test_it_finds_what_brute_force_finds(gpus: int, budget_gib: float, classes: int, gpu: str) -> None:
    check_against_brute_force(gpus, budget_gib, classes, gpu)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, phases=[Phase.generate], derandomize=True)
@given(*SPACES)
def test_it_finds_what_brute_force_finds_in_more_spaces(gpus: int, budget_gib: float, classes: int, gpu: str) -> None:
    check_against_brute_force(gpus, budget_gib, classes, gpu)


def check_against_brute_force(gpus: int, budget_gib: float, classes: int, gpu: str) -> None:
    cluster = Cluster(gpus, gpu)
    asked = request(8, SEQUENCE, budget_gib * GIB, pins=Pins(forbid={"micro_batch": (8, 4)}))
    models = {tp: [small(tp, classes)] for tp in (1, 2)}
    prices = {
        (tp, price.micro_batch): price
        for tp in models
        for price in price_model(models[tp][0], [1, 2], SEQUENCE, cluster.hardware, "bf16")
    }
    choices = enumerate_space(asked, cluster, LAYERS, [(1, tp) for tp in models], {}).choices
    best_s = min(
        brute_force(prices[choice.mesh.tp, choice.batch.micro_batch], choice, asked, cluster.hardware)
        for choice in choices
    )
    try:
        found = search(
            [model for of_size in models.values() for model in of_size],
            cluster,
            global_batch=8,
            sequence=SEQUENCE,
            budget_bytes=asked.budget_bytes,
            pins=asked.pins,
        )
    except InfeasibleError:
        assert best_s == inf
        return
    assert found.chosen.estimate.step_time_s == pytest.approx(best_s, rel=1e-6)
    assert found.chosen.estimate.peak_bytes <= asked.budget_bytes * (1 + 1e-9)


def find(**arguments: object) -> SearchResult:
    defaults: dict[str, object] = {"global_batch": 512, "sequence": 8192}
    return search(llama(), Cluster(64), **{**defaults, **arguments})  # type: ignore[arg-type]


def test_llama_on_64_gpus_is_planned_in_seconds() -> None:
    for budget_gib in (79, 20):
        started_s = time.process_time()  # of the processor: the machine may be busy
        result = find(budget_bytes=budget_gib * GIB)
        assert time.process_time() - started_s < 10
        check_plans(result, budget_gib)


@pytest.mark.slow
def test_so_it_is_when_traced() -> None:
    """In its layers more may be recomputed than in those made here."""
    from examples.llama import llama_3_8b

    started_s = time.process_time()
    check_plans(parallelize(llama_3_8b, 64, gpu="h100-sxm-80gb").result, 79.2)
    assert time.process_time() - started_s < 40


def check_plans(result: SearchResult, budget_gib: float) -> None:
    assert all(c.estimate.peak_bytes <= budget_gib * GIB for c in result.best)
    steps = [c.estimate.step_time_s for c in result.best]
    assert steps == sorted(steps) and len({str(c.plan.mesh) for c in result.best}) == len(steps)
    assert result.chosen.plan.mesh.world_size == 64


def test_less_memory_is_no_faster() -> None:
    steps = [find(budget_bytes=gib * GIB).chosen.estimate.step_time_s for gib in (79, 40, 20)]
    assert steps == sorted(steps)


def test_the_better_solution_of_a_size_is_chosen() -> None:
    slow = replace(model(tp=2), solution="slow", prologue=replace(model(tp=2).prologue, ops=model().prologue.ops * 50))
    result = search([slow, model(tp=2)], Cluster(16), global_batch=64, sequence=8192, pins=Pins(tp=2))
    assert {c.model.solution for c in result.best} == {"megatron"}


def test_pinned_recompute_is_kept() -> None:
    pinned = {"pp": 2, "tp": 2, "dp": 16}
    for recompute, expected in (("none", 0), ("full", 32), (3, 6), ((1, 30), 2)):
        result = find(pins=Pins(recompute=recompute, **pinned))  # type: ignore[arg-type]
        assert len(by_layer(result.chosen.plan.activations.recompute)) == expected
    assert result.chosen.plan.activations.recompute == whole_layers((1, 30))
    # Of the regions those that the layers have; layers of which it is not known that they follow each other, alone.
    for words, what in (
        ("activation", "activation"),
        ("groups of 4", "layer"),
        ("attention, activation", "activation"),
    ):
        plan = find(pins=Pins(pp=2, tp=2, dp=16, recompute=words)).chosen.plan
        assert plan.activations.recompute == (RecomputeChoice(0, 32, what),)


def test_layers_that_follow_each_other_are_recomputed_in_groups() -> None:
    """32 layers on 2 stages, 16 of them in groups of 5 where a pin says so; the rest of each stage by itself."""
    chained = [replace(model(tp=2), chains=(0,) * 32)]
    pins = Pins(pp=2, tp=2, dp=16, recompute="groups of 5", schedule="1f1b")
    found = search(chained, Cluster(64), global_batch=512, sequence=8192, pins=pins).chosen.plan
    groups = [(again.start, again.stop) for again in found.activations.recompute if again.group == 5]
    cut = found.pipeline.stages[0][1]
    assert all((stop - start) % 5 == 0 and (stop <= cut or start >= cut) for start, stop in groups) and len(groups) == 2
    assert len(by_layer(found.activations.recompute)) == 32


def test_groups_free_what_whole_layers_keep() -> None:
    """With little memory and many micro-batches in flight the inputs of the layers are too much: groups share them."""
    chained = [replace(model(vocabulary=1000), chains=(0,) * 32)]

    def found(budget_bytes: float, recompute: str | None) -> SearchResult:
        pins = Pins(pp=4, tp=1, dp=1, micro_batch=4, schedule="gpipe", recompute=recompute)
        return search(
            chained, Cluster(4), global_batch=512, sequence=8192, budget_bytes=budget_bytes, pins=pins
        )  # fmt: skip

    whole_bytes = found(1e15, "full").chosen.estimate.peak_bytes
    chosen = found(0.8 * whole_bytes, None).chosen
    assert any(again.group > 1 for again in chosen.plan.activations.recompute)
    assert chosen.estimate.peak_bytes <= 0.8 * whole_bytes


def test_fewer_gpus_are_said_aloud() -> None:
    models = [small(1)]
    result = search(models, Cluster(7), global_batch=8, sequence=SEQUENCE)
    used = result.chosen.plan.mesh.world_size
    assert used < 7 and result.notes[0].startswith(f"uses {used} of 7 GPUs: no legal plan that fits uses all 7")


def test_huge_spaces_are_searched_so_far_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = search(llama(), Cluster(16, "h100-sxm-80gb"), global_batch=64, sequence=SEQUENCE)
    monkeypatch.setattr("autopar.search.search._MOST_SOLVED", 3)
    cut = search(llama(), Cluster(16, "h100-sxm-80gb"), global_batch=64, sequence=SEQUENCE)
    assert cut.best and whole.not_priced == 0 < cut.not_priced
    assert f"{cut.not_priced:,} not priced" in plan_table(cut, "Llama", 1)
    assert "not priced" not in plan_table(whole, "Llama", 1)


def test_too_small_a_budget_names_the_nearest_plan_and_the_shortfall() -> None:
    with pytest.raises(InfeasibleError, match=r"no plan fits 10.0 GiB a GPU: the nearest \(.*needs .* too much"):
        search(llama(), Cluster(2), global_batch=64, sequence=8192, budget_bytes=10 * GIB)


def test_unknown_optimizers_are_refused_before_the_search() -> None:
    with pytest.raises(PlanError, match="LBFGS"):
        find(optimizer=Optimizer("LBFGS"))


def test_the_table_and_the_ledger() -> None:
    result = find(budget_bytes=40 * GIB, illegal={"tp=24": "32 heads"})
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


def test_a_model_without_a_sequence_counts_samples() -> None:
    result = find(budget_bytes=40 * GIB)
    batch = replace(result.request.batch, sequence=1)
    images = replace(result, request=replace(result.request, batch=batch))
    table = plan_table(images, "ViT", 86_000_000)
    assert "512 samples a step" in table and "samples/s/GPU" in table and "tokens" not in table


def test_offload_is_chosen_where_nothing_else_fits() -> None:
    """Llama-3-8B on one GPU of 80 GB: 18 bytes a parameter are 145 GB; the bf16 copy alone is 16."""
    one = {"global_batch": 4, "sequence": 2048}
    result = search(llama((1,)), Cluster(1), **one)  # type: ignore[arg-type]
    assert result.chosen.plan.sharding.offload and result.chosen.plan.sharding.zero >= 1
    assert "offload" in plan_table(result, "Llama", 8_030_261_248) and "host: master weights" in explain(result)
    with pytest.raises(InfeasibleError, match="no plan fits 79.1 GiB a GPU with offload=False"):
        search(llama((1,)), Cluster(1), pins=Pins(offload=False), **one)  # type: ignore[arg-type]


def test_offload_is_not_chosen_where_there_is_room() -> None:
    assert not any(candidate.plan.sharding.offload for candidate in find().best)


def test_the_host_s_memory_is_a_constraint_too() -> None:
    """M7: 8 billion parameters on a GPU whose share of its node's memory is 57 GiB."""
    with pytest.raises(InfeasibleError, match=r"no plan fits the memory of the hosts with offload=True: .* 57.6 GiB"):
        search(llama((1,)), Cluster(1, "a100-pcie-80gb"), global_batch=4, sequence=512, pins=Pins(offload=True))


def test_groups_of_hsdp_are_found_and_pinned() -> None:
    """Across slow links ZeRO-3 gathers in a node; eight nodes of eight."""
    pinned = {"pp": 1, "tp": 1, "dp": 64, "zero": 3}
    result = find(pins=Pins(**pinned))  # type: ignore[arg-type]
    ways = {hsdp: find(pins=Pins(hsdp=hsdp, **pinned)).chosen for hsdp in (8, 16, 64)}  # type: ignore[arg-type]
    assert {hsdp: way.plan.sharding.hsdp for hsdp, way in ways.items()} == {8: 8, 16: 16, 64: None}
    assert result.chosen.estimate.step_time_s <= min(way.estimate.step_time_s for way in ways.values())
