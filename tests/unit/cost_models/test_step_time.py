"""Overlap, and whole-step estimates on plans whose answer is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.data_parallel import gathers, reductions
from autopar.cost_models.hardware import Cluster
from autopar.cost_models.step_time import Estimate, estimate
from autopar.plan.plan import Plan
from autopar.plan.recompute import whole_layers
from autopar.runtime.choices import Mesh
from tests.unit.cost_models.fabricate import model

times = st.lists(st.floats(0, 10), min_size=1, max_size=8)


def predict(
    mesh: Mesh, stages: tuple[tuple[int, int], ...] = ((0, 8),), gpu: str = "h100-sxm-80gb", **choices: object
) -> Estimate:
    defaults: dict[str, object] = {"global_batch": 64, "micro_batch": 1, "sequence": 4096, "stages": stages}
    defaults["schedule"] = "1f1b" if mesh.pp > 1 else "none"
    plan = Plan.of(mesh=mesh, **{**defaults, **choices})  # type: ignore[arg-type]
    return estimate(model(layers=8, tp=mesh.tp), plan, Cluster(mesh.world_size, gpu))


@given(times, st.floats(0, 1))
def test_communication_is_either_exposed_or_hidden(compute: list[float], share: float) -> None:
    comm = [time / 2 for time in compute]
    for overlap in (gathers(compute, comm, share), reductions(compute, comm, share)):
        assert overlap.exposed_s + overlap.hidden_s == pytest.approx(sum(comm))
        assert overlap.exposed_s >= -1e-9 and overlap.hidden_s >= -1e-9


def test_what_can_hide_hides() -> None:
    assert reductions([1, 1, 1], [0.5, 0.5, 0.5]).exposed_s == pytest.approx(0.5)
    assert reductions([1, 1], [3, 3]).exposed_s == pytest.approx(5)
    assert reductions([1, 1], [3, 3], share=0).exposed_s == pytest.approx(6)
    assert gathers([1, 1, 1], [0.5, 0.5, 2]).exposed_s == pytest.approx(1.5)


def test_one_gpu_has_no_communication_and_no_bubble() -> None:
    result = predict(Mesh())
    names = {term.name: term.time_s for term in result.stages[0].time}
    assert names["tp communication"] == names["dp communication"] == result.bubble == 0
    assert 0.3 < result.mfu < 0.8
    assert result.step_time_s == pytest.approx(sum(term.time_s for term in result.step))
    assert result.step[0].time_s == pytest.approx(64 * result.stages[0].micro_batch_s)


def test_data_parallel_scales_but_for_its_communication() -> None:
    one, eight = predict(Mesh()), predict(Mesh(dp=8), zero=1)
    assert one.step_time_s / 8 < eight.step_time_s < one.step_time_s / 8 * 1.3
    assert eight.peak_bytes < one.peak_bytes


def test_fp16_unscales_its_gradients() -> None:
    """Read and written once, on each rank its shard; elsewhere nothing is unscaled."""
    half, brain = (predict(Mesh(dp=8), zero=1, precision=precision) for precision in ("fp16", "bf16"))
    terms = {term.name: term.time_s for term in half.step}
    hardware = Cluster(8).hardware
    rate = hardware.memory_bytes_per_s * hardware.memory_efficiency
    assert terms["unscaling of gradients"] == pytest.approx(2 * 4 * parameters() / 8 / rate)
    assert half.step_time_s - brain.step_time_s == pytest.approx(terms["unscaling of gradients"])
    assert half.peak_bytes == brain.peak_bytes and "unscaling of gradients" not in {t.name for t in brain.step}


def parameters() -> int:
    costs = model(layers=8)
    blocks = [costs.prologue, costs.epilogue, *(costs.classes[name] for name in costs.layers)]
    return sum(block.parameters for block in blocks)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_reduction_in_half_precision_moves_half_the_bytes(zero: int) -> None:
    def communicated_s(reduce_dtype: str | None) -> float:
        result = predict(Mesh(dp=8), zero=zero, reduce_dtype=reduce_dtype)
        (dp,) = (term for term in result.stages[0].time if term.name == "dp communication")
        return dp.time_s + dp.hidden_s

    full, half = communicated_s("fp32"), communicated_s("bf16")
    assert communicated_s(None) == full
    m = 8  # micro-batches; in units of 2 bytes a parameter
    gathered, reduced = {0: (0, 2), 1: (1, 1), 2: (1, m), 3: (2 * m, m)}[zero]
    assert half / full == pytest.approx((gathered + reduced) / (gathered + 2 * reduced), rel=0.05)


def test_zero_trades_memory_for_time() -> None:
    estimates = [predict(Mesh(dp=8), zero=zero) for zero in range(4)]
    peaks = [result.peak_bytes for result in estimates]
    assert peaks == sorted(peaks, reverse=True)
    # ZeRO 3 gathers each unit twice a micro-batch: no faster than ZeRO 1.
    assert estimates[3].step_time_s >= estimates[1].step_time_s


def test_recompute_trades_time_for_memory() -> None:
    plain, full = predict(Mesh(dp=2)), predict(Mesh(dp=2), recompute=whole_layers(range(8)))
    assert full.peak_bytes < plain.peak_bytes and full.step_time_s > 1.2 * plain.step_time_s
    assert full.mfu < plain.mfu and full.stages[0].recomputed == (("layer", 8),)


def test_the_pipeline_has_the_bubble_of_its_slowest_stage() -> None:
    result = predict(Mesh(pp=2), stages=((0, 5), (5, 8)), micro_batch=4)
    slowest = max(stage.micro_batch_s for stage in result.stages)
    assert result.step[0].time_s > 16 * slowest
    assert 0.02 < result.bubble < 0.4


def test_gpipe_holds_all_micro_batches() -> None:
    stages = ((0, 4), (4, 8))
    gpipe, one = (predict(Mesh(pp=2), stages=stages, schedule=name) for name in ("gpipe", "1f1b"))
    assert gpipe.peak_bytes > 5 * one.peak_bytes
    assert gpipe.step_time_s == pytest.approx(one.step_time_s, rel=0.05)


def test_tied_embeddings_on_two_stages_cost_a_copy() -> None:
    stages = ((0, 4), (4, 8))
    plan = Plan.of(Mesh(pp=2), 64, 1, 4096, stages, "1f1b")
    tied, untied = (estimate(model(layers=8, tied=flag), plan, Cluster(2)) for flag in (True, False))
    assert tied.stages[1].memory[0] == untied.stages[1].memory[0]
    assert "tied gradients" in {term.name for term in tied.step} - {term.name for term in untied.step}
    # The copy is stepped where it lies: the last stage updates as much as if the head were its own.
    updates = [{term.name: term.time_s for term in e.step}["optimizer, gradient norm"] for e in (tied, untied)]
    assert updates[0] == updates[1]
    whole = estimate(model(layers=8, tied=True), Plan.of(Mesh(dp=2), 64, 1, 4096, ((0, 8),)), Cluster(2))
    assert updates[0] > {term.name: term.time_s for term in whole.step}["optimizer, gradient norm"] / 2


# --------------------------------------------------------------------------------
# Groups of hsdp, and offload


def test_gathers_inside_a_node_are_cheaper_than_across_slow_links() -> None:
    """Nodes of 4 × 100 Gbit/s: ZeRO-3 of 8 micro-batches gathers 16 times within NVLink, and reduces once across."""
    whole, grouped = (
        predict(Mesh(dp=32), zero=3, hsdp=hsdp, global_batch=256, gpu="a100-sxm4-40gb") for hsdp in (None, 8)
    )
    exposed = [{t.name: t.time_s for t in result.stages[0].time}["dp communication"] for result in (whole, grouped)]
    assert exposed[1] < exposed[0]
    assert grouped.peak_bytes > whole.peak_bytes


def test_all_data_ranks_are_the_group_that_hsdp_leaves_out() -> None:
    assert predict(Mesh(dp=8), zero=2, hsdp=8) == predict(Mesh(dp=8), zero=2)


def test_offload_trades_device_memory_for_time() -> None:
    for zero in (1, 2, 3):
        kept, offloaded = (predict(Mesh(dp=2), zero=zero, offload=offload) for offload in (False, True))
        assert offloaded.peak_bytes < kept.peak_bytes
        assert offloaded.step_time_s > kept.step_time_s
        assert offloaded.stages[0].host_bytes > 0 == kept.stages[0].host_bytes


def test_the_update_on_the_host_takes_its_memory_s_bandwidth() -> None:
    host = Cluster(2).hardware.host
    assert host is not None
    costs = model(layers=8)
    parameters = sum(c.parameters for c in (costs.prologue, costs.epilogue)) + 8 * costs.classes["layer0"].parameters
    update = predict(Mesh(), zero=1, offload=True).step[1].time_s
    assert update == pytest.approx(parameters * (4 * 4 + 2 * 8) / host.memory_bytes_per_s, rel=1e-6)


def test_a_plain_all_reduce_hides_behind_nothing() -> None:
    """Outside fully_shard (ZeRO-0 in fp32) gradients are reduced when the last backward has ended."""
    dp = next(term for term in predict(Mesh(dp=8), precision="fp32").stages[0].time if term.name == "dp communication")
    assert dp.hidden_s == 0 < dp.time_s
