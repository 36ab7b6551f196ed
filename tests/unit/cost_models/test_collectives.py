"""The alpha-beta model: monotone, right in its limits, placed by the mesh."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.collectives import COLLECTIVES, Group, axis_group, collective_time_s
from autopar.cost_models.hardware import gpu
from autopar.runtime.choices import Mesh

H100 = gpu("h100-sxm-80gb")
collectives = st.sampled_from(COLLECTIVES)
sizes = st.floats(1.0, 1e12)
ranks = st.integers(2, 512)
per_node = st.sampled_from([1, 2, 4, 8])


@given(collectives, sizes, sizes, ranks, per_node)
def test_more_bytes_take_longer(collective: str, a: float, b: float, n: int, g: int) -> None:
    less, more = sorted((a, b))
    group = Group(n, min(n, g))
    assert collective_time_s(collective, less, group, H100) <= collective_time_s(collective, more, group, H100)


@given(st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]), sizes, ranks, ranks, per_node)
def test_more_ranks_take_longer(collective: str, size: float, a: int, b: int, g: int) -> None:
    few, many = sorted((a, b))
    few_s = collective_time_s(collective, size, Group(few, min(few, g)), H100)
    assert few_s <= collective_time_s(collective, size, Group(many, min(many, g)), H100) * (1 + 1e-12)


@given(st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]), sizes, st.sampled_from([8, 16, 64]))
def test_spreading_a_group_over_nodes_is_no_faster(collective: str, size: float, n: int) -> None:
    times = [collective_time_s(collective, size, Group(n, g), H100) for g in (8, 4, 2, 1)]
    assert times == sorted(times)


def test_large_all_reduce_reaches_the_bus_bandwidth() -> None:
    size = 1e11
    for group, bandwidth in ((Group(8, 8), H100.intra.bytes_per_s), (Group(64, 1), H100.inter.bytes_per_s)):
        n = group.ranks
        bus = size * 2 * (n - 1) / n / collective_time_s("all_reduce", size, group, H100)
        assert abs(bus / bandwidth - 1) < 0.01


def test_all_reduce_is_reduce_scatter_and_all_gather() -> None:
    group, size = Group(16, 8), 1e10
    parts = sum(collective_time_s(name, size, group, H100) for name in ("reduce_scatter", "all_gather"))
    assert abs(collective_time_s("all_reduce", size, group, H100) / parts - 1) < 0.01


def test_a_group_of_one_is_free() -> None:
    assert all(collective_time_s(name, 1e9, Group(1, 1), H100) == 0 for name in COLLECTIVES)


def test_groups_follow_the_order_of_the_axes() -> None:
    mesh = Mesh(pp=2, dp=8, tp=4)
    assert axis_group(mesh, "tp", 8) == Group(4, 4)
    assert axis_group(mesh, "data", 8) == Group(8, 2)
    assert axis_group(mesh, "pp", 8) == Group(2, 1)
    assert axis_group(Mesh(dp=4, tp=16), "tp", 8).nodes == 2
