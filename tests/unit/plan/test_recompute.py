"""The words of recompute, and how a plan has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import PlanError
from autopar.plan.plan import Plan
from autopar.plan.recompute import (
    RecomputeChoice,
    by_layer,
    choice,
    from_plain,
    recompute_choices,
    summary,
    to_plain,
    whole_layers,
)
from autopar.runtime.choices import Mesh

MIXED = (RecomputeChoice(0, 12, "attention core, mlp"), RecomputeChoice(12, 13), RecomputeChoice(14, 20, "groups of 3"))


def test_each_choice_has_one_form() -> None:
    assert choice("mlp,attention_core") == "attention core, mlp"
    assert choice("attention, attention core") == "attention"  # the core is a part of it
    assert choice("groups of 1") == choice("layer") == "layer"
    with pytest.raises(PlanError, match="recompute='mpl': use 'attention core', 'attention'"):
        choice("mpl")


def test_layers_and_ranges_are_inverse() -> None:
    assert recompute_choices(by_layer(MIXED)) == MIXED
    assert from_plain(to_plain(MIXED)) == MIXED
    assert to_plain(MIXED) == {"0-11": "attention core, mlp", "12": "layer", "14-19": "groups of 3"}


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = Plan.of(Mesh(), 8, 4, 16, ((0, 20),), recompute=MIXED)
    plan.save(tmp_path / "plan.yaml")
    assert "0-11: attention core, mlp" in (tmp_path / "plan.yaml").read_text()
    assert Plan.load(tmp_path / "plan.yaml").activations.recompute == MIXED


def test_an_older_plan_has_a_list_of_layers(tmp_path: Path) -> None:
    text = Plan.of(Mesh(), 8, 4, 16, ((0, 20),))
    text.save(tmp_path / "plan.yaml")
    written = (tmp_path / "plan.yaml").read_text()
    (tmp_path / "plan.yaml").write_text(written.replace("recompute: {}", "recompute: [1, 2, 5]"))
    assert (
        Plan.load(tmp_path / "plan.yaml").activations.recompute
        == whole_layers((1, 2, 5))
        == (RecomputeChoice(1, 3), RecomputeChoice(5, 6))
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{0-3: mlp, 2: layer}", "layer 2 is in two ranges"),
        ("{0-3: mpl}", "recompute='mpl': use"),
        ("{first: mlp}", "is not what to recompute of which layers"),
    ],
)
def test_a_wrong_recompute_is_told(given: str, message: str, tmp_path: Path) -> None:
    Plan.of(Mesh(), 8, 4, 16, ((0, 20),)).save(tmp_path / "plan.yaml")
    written = (tmp_path / "plan.yaml").read_text()
    (tmp_path / "plan.yaml").write_text(written.replace("recompute: {}", f"recompute: {given}"))
    with pytest.raises(PlanError, match=message):
        Plan.load(tmp_path / "plan.yaml")


@pytest.mark.parametrize(
    ("recompute", "text"),
    [
        ((), "none"),
        (whole_layers(range(8)), "full"),
        (whole_layers(range(3)), "3 of 8 layers"),
        ((RecomputeChoice(0, 8, "attention core"),), "attn core"),
        ((RecomputeChoice(0, 2, "attention core, mlp"), RecomputeChoice(4, 8)), "2 attn core, mlp + 4 layer"),
    ],
)
def test_the_tables_column(recompute: tuple[RecomputeChoice, ...], text: str) -> None:
    assert summary(recompute, 8) == text
