"""What is legal, and the errors for what is not."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.cost_models.hardware import Cluster
from autopar.errors import PlanError
from autopar.plan.schedules import why_not, why_not_split
from autopar.rules.spread import Coupling
from autopar.runtime.choices import SCHEDULES, Mesh
from autopar.search.pins import Pins
from autopar.search.space import Space, enumerate_space
from tests.unit.search.requests import request

SOLVED = [(1, 1), (1, 2), (1, 4), (1, 8)]  # cp, tp


def space(gpus: int = 8, batch: int = 16, layers: int = 4, **pins: Any) -> Space:
    asked = request(batch, 128, 1e12, pins=Pins(**pins))
    return enumerate_space(asked, Cluster(gpus), layers, SOLVED, {"tp=3": "4 heads"})


def test_every_choice_is_legal() -> None:
    for choice in space().choices:
        mesh = choice.mesh
        assert mesh.world_size <= 8 and mesh.pp <= 4
        assert choice.batch.micro_batch * choice.micro_batches * mesh.dp == 16
        assert choice.schedule == "none" if mesh.pp == 1 else choice.schedule in SCHEDULES[1:]
        assert not why_not(choice.schedule, mesh.pp, choice.virtual_stages, choice.micro_batches)
        assert not why_not_split(choice.schedule, choice.sharding.zero, recompute=False)
        assert mesh.pp * choice.virtual_stages <= 4
        assert choice.schedule != "1f1b" or choice.micro_batches >= mesh.pp
        assert choice.sharding.zero == 0 or mesh.dp > 1 or choice.sharding.offload
        assert choice.sharding.zero > 0 or not choice.sharding.offload


def test_reasons_are_named() -> None:
    assert space().not_legal == (
        "tp=3 (4 heads)", "pp=8 (4 layers)", "zero-bubble with zero=2 or 3 (its halves of a backward do not reshard)",
        "zero-bubble with recompute (the second half would run it again)",
    )  # fmt: skip
    assert "dp=8 (global batch 12)" in space(batch=12).not_legal


def test_pins_and_bans_restrict() -> None:
    assert {choice.mesh for choice in space(pp=2, tp=2, dp=2).choices} == {Mesh(pp=2, dp=2, tp=2)}
    assert {choice.sharding.zero for choice in space(zero=2).choices} == {2}
    banned = space(forbid={"schedule": ("gpipe",), "pp": (4,)}).choices
    assert {choice.schedule for choice in banned} == {"none", "1f1b", "interleaved", "zero-bubble"}
    assert {choice.virtual_stages for choice in space(schedule="interleaved").choices} == {2}
    assert {c.virtual_stages for c in space(schedule="zero-bubble", virtual_stages=2).choices} == {2}
    assert not [c for c in space(recompute="full").choices if c.schedule == "zero-bubble"]
    assert {choice.mesh.pp for choice in banned} == {1, 2, 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpus": 7, "tp": 2}, "gpus=7 is not divisible by tp=2: use gpus=6 or 8, or tp one of 1, 7"),
        ({"gpus": 8, "tp": 2, "pp": 3}, "gpus=8 is not divisible by pp=3 × tp=2 = 6: use gpus=6 or 12"),
        ({"dp": 2, "tp": 2, "pp": 1}, "= 4 leaves 4 of gpus=8 idle: use gpus=4"),
        ({"batch": 10, "dp": 4}, "global_batch=10 is not divisible by dp=4: use global_batch=8 or 12"),
        ({"batch": 10, "dp": 2, "micro_batch": 3}, "micro_batch=3 × dp=2 = 6: use global_batch=6 or 12"),
        ({"schedule": "1f1b", "pp": 1}, "1f1b needs pp > 1"),
        ({"schedule": "interleaved", "virtual_stages": 1}, "interleaved needs pp > 1, virtual_stages of 2 or more"),
        ({"schedule": "1f1b", "virtual_stages": 2}, "virtual_stages > 1 are for interleaved and zero-bubble"),
        ({"virtual_stages": 4, "pp": 2}, r"virtual_stages=4 \(pp · virtual_stages stages of 4 layers\)"),
        ({"schedule": "zero-bubble", "dp": 2, "zero": 3}, "zero-bubble with zero=2 or 3"),
        ({"schedule": "zero-bubble", "recompute": "full"}, "zero-bubble with recompute"),
        ({"pp": 8}, r"pp=8 \(4 layers\)"),
        (
            {"recompute": "some"},
            "recompute='some': use 'none', 'full', 'attention core', 'attention', 'activation', 'mlp'",
        ),
        ({"recompute": "groups of 0"}, "recompute='groups of 0': use 'none', 'full'"),
        ({"forbid": {"ep": (2,)}}, "forbid has no such pin; use pp, dp"),
        ({"micro_batch": 0}, "micro_batch=0: use a whole number of samples, 1 to"),
    ],
)
def test_errors_carry_the_arithmetic_and_the_way_out(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        space(**arguments)


def coupled(replicas: bool, **pins: Any) -> Space:
    coupling = Coupling("loss couples samples at model.py:7", "    > norm(x)", replicas)
    asked = request(16, 128, 1e12, pins=Pins(**pins), coupling=coupling)
    return enumerate_space(asked, Cluster(8), 4, SOLVED, {})


def test_coupled_samples_stay_in_one_micro_batch() -> None:
    spaces = {replicas: coupled(replicas) for replicas in (True, False)}
    for replicas, found in spaces.items():
        assert {choice.micro_batches for choice in found.choices} == {1}
        assert ({choice.mesh.dp for choice in found.choices} == {1}) is not replicas
    assert "several micro-batches (loss couples samples at model.py:7)" in spaces[True].not_legal
    assert "dp > 1 and several micro-batches (loss couples samples at model.py:7)" in spaces[False].not_legal


def test_pins_that_would_split_coupled_samples_are_refused_with_the_graph() -> None:
    with pytest.raises(PlanError, match=r"micro-batches \(loss couples samples at model.py:7\)(.|\n)*    > norm"):
        coupled(True, micro_batch=2, dp=4)
    with pytest.raises(PlanError, match="dp > 1 and several micro-batches"):
        coupled(False, dp=2)


def test_groups_of_hsdp_are_nodes_and_for_zero_3_several() -> None:
    asked = request(96, 128, 1e12, pins=Pins(pp=1, tp=1, dp=48, micro_batch=1))
    found = enumerate_space(asked, Cluster(48), 4, [(1, 1)], {}).choices
    groups = {zero: {choice.sharding.hsdp for choice in found if choice.sharding.zero == zero} for zero in (0, 1, 3)}
    assert groups == {0: {None}, 1: {None, 8}, 3: {None, 8, 16, 24}}


def test_a_pinned_group_is_any_that_divides() -> None:
    found = space(48, 96, hsdp=3, dp=48, pp=1, tp=1).choices
    assert {choice.sharding.hsdp for choice in found} == {3} and all(choice.sharding.zero for choice in found)
    assert {choice.sharding.hsdp for choice in space(48, 96, hsdp=48, dp=48).choices} == {None}


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"hsdp": 3, "dp": 8}, "hsdp=3 needs zero=1, 2 or 3 and data ranks that it divides"),
        ({"hsdp": 2, "zero": 0}, "hsdp=2 needs zero=1, 2 or 3"),
        ({"offload": True, "zero": 0}, "offload needs zero=1, 2 or 3"),
        ({"hsdp": 0}, "hsdp=0: use a whole number of ranks"),
    ],
)
def test_pins_of_sharding_that_cannot_be(pins: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        space(**pins)
