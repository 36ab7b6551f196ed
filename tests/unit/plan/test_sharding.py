"""Groups of hsdp and offload in a plan: what is legal, and YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopar.errors import PlanError
from autopar.plan.plan import Plan
from autopar.runtime.choices import Mesh

PLAN = Plan.of(Mesh(dp=8), 64, 1, 16, ((0, 4),), zero=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zero": 0, "hsdp": 2}, "hsdp=2 with zero=0: ZeRO-0 shards nothing; use zero=1, 2 or 3"),
        ({"hsdp": 3}, r"does not divide the 8 data ranks \(dp=8 × cp=1\); use one of 2, 4, 8, or leave hsdp out"),
        ({"hsdp": 1}, "hsdp=1: a group of one shards nothing; use one of 2, 4, 8"),
        ({"hsdp": 2, "mesh": Mesh(tp=2)}, "use several data ranks, or leave hsdp out"),
        ({"zero": 0, "offload": True}, "offload with zero=0: .* use zero=1, 2 or 3"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PLAN.changed(**change)


@pytest.mark.parametrize("change", [{}, {"hsdp": 4}, {"hsdp": 8, "offload": True}, {"offload": True}])
def test_yaml_keeps_them(change: dict[str, Any], tmp_path: Path) -> None:
    plan = PLAN.changed(**change)
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == plan


def test_a_plan_of_before_has_neither(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text().replace("hsdp: null\n", "").replace("offload: false\n", "")
    (tmp_path / "plan.yaml").write_text(text)
    assert Plan.load(tmp_path / "plan.yaml") == PLAN


@pytest.mark.parametrize(("key", "value"), [("hsdp", "two"), ("hsdp", "true"), ("offload", "1"), ("offload", "host")])
def test_a_wrong_form_is_told_by_its_key(key: str, value: str, tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.yaml")
    lines = (tmp_path / "plan.yaml").read_text().splitlines()
    edited = [f"{key}: {value}" if line.startswith(f"{key}:") else line for line in lines]
    (tmp_path / "plan.yaml").write_text("\n".join(edited))
    with pytest.raises(PlanError, match=f"plan.yaml: {key}: .* is not "):
        Plan.load(tmp_path / "plan.yaml")


def test_they_are_named_after_the_stage() -> None:
    assert PLAN.sharding.text() == "3"
    assert PLAN.changed(hsdp=4).sharding.text() == "3 hsdp4"
    assert PLAN.changed(hsdp=4, offload=True).sharding.text() == "3 hsdp4 offload"


def test_a_file_that_is_no_yaml_is_one_line_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("mesh: {pp: 1\nzero: 0\n")
    with pytest.raises(PlanError, match=r"plan.yaml, line 2: this is no YAML: .*") as refused:
        Plan.load(tmp_path / "plan.yaml")
    assert len(str(refused.value).splitlines()) == 1
