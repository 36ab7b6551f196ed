"""The roofline, block prices, and their sums over stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv, PythonMod

from autopar.cost_models.block import op_time_s, price_block
from autopar.cost_models.collectives import Group
from autopar.cost_models.compute import price_model, stage_shape, stage_time
from autopar.cost_models.hardware import gpu
from autopar.cost_models.layer_costs import B, S
from autopar.plan.recompute import whole_layers
from tests.unit.cost_models.fabricate import layer, model

H100 = gpu("h100-sxm-80gb")


@given(st.floats(1, 1e15), st.floats(1, 1e12))
def test_an_op_takes_its_slower_resource_and_at_most_a_fifth_more(flops: float, size_bytes: float) -> None:
    math_s = flops / (H100.peak("bf16") * H100.matmul_efficiency)
    memory_s = size_bytes / (H100.memory_bytes_per_s * H100.memory_efficiency)
    time_s = op_time_s("matmul", flops, size_bytes, H100, "bf16")
    assert max(math_s, memory_s) <= time_s * (1 + 1e-9) and time_s <= 1.19 * max(math_s, memory_s)


def test_memory_bound_ops_ignore_flops() -> None:
    assert op_time_s("memory", 1e15, 0.0, H100, "bf16") == 0.0


def test_small_blocks_wait_for_the_host() -> None:
    block = layer("tiny", 64, 128, 1.0, 1)
    price = price_block(block, [1], 16, H100, "bf16", {"cp": Group(1, 1), "tp": Group(1, 1)})[0]
    assert price.forward.total_s == pytest.approx(len(block.ops) * H100.launch_s)
    assert price.forward.launch_s > 0.9 * price.forward.total_s


def test_prices_are_the_expressions_at_each_micro_batch() -> None:
    block = layer("layer", 1024, 4096, 0.25, 2)
    groups = {"cp": Group(1, 1), "tp": Group(2, 2)}
    for b, price in zip((1, 3), price_block(block, [1, 3], 512, H100, "bf16", groups), strict=True):
        assert price.saved_bytes == float(block.saved_bytes.subs({B: b, S: 512}))
        assert price.forward.tp_s > 0 and price.parameters == block.parameters


def test_sizes_divided_by_torch_s_own_functions_are_priced() -> None:
    block = layer("layer", 1024, 4096, 0.25, 1)
    halved = replace(block, saved_bytes=block.saved_bytes.subs(S, FloorDiv(S, 2) + PythonMod(S, 2)))
    (price,) = price_block(halved, [2], 511, H100, "bf16", {"cp": Group(1, 1), "tp": Group(1, 1)})
    assert price.saved_bytes == float(block.saved_bytes.subs({B: 2, S: 256}))


def test_stages_add_up_to_the_model() -> None:
    price = price_model(model(layers=5, classes=2), [2], 1024, H100, "bf16")[0]
    stages = [(0, 2), (2, 3), (3, 5)]
    times = [stage_time(price, stage_shape(price, *stage)).total_s for stage in stages]
    assert sum(times) == pytest.approx(price.work_s)


def test_recompute_repeats_the_forward() -> None:
    price = price_model(model(layers=4), [1], 1024, H100, "bf16")[0]
    time = stage_time(price, stage_shape(price, 0, 2, recompute=whole_layers((1, 3))))
    assert time.recompute == price.classes[0].forward
