"""Models of one length: traced with that length in the shapes; every other length, and cp, is refused with the line."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.api import Parallelized
from autopar.errors import PlanError
from autopar.ir.graph import B, info
from autopar.runtime.choices import Mesh
from autopar.search.job import cp_sizes
from autopar.search.pins import Pins
from autopar.trace.export import trace
from tests.first_hour import fixed_length as models

LINE = r"takes sequences of 8 alone at \S*fixed_length.py:\d+\n(.*\n)*  → .*\+ self.pos"


@cache
def planned(**pins: Any) -> Parallelized:
    result: Parallelized = autopar.parallelize(
        models.FixedTable(), 2, gpu="cpu", inputs=models.INPUTS, global_batch=8, dp=pins.pop("dp", 2), **pins
    )
    return result


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        (models.FixedTable, models.INPUTS),
        (models.ClassToken, models.CLASS_INPUTS),
        (models.FixedBias, models.INPUTS),
        (models.ListedPositions, models.INPUTS),
    ],
)
def test_shapes_have_the_length(kind: type[nn.Module], inputs: dict[str, Any]) -> None:
    program = trace(kind(), inputs, torch.float32)
    assert program.fixed_length is not None
    assert program.fixed_length.tokens == 8
    assert program.sequence_range == (8, 8)
    assert {size for _, n in program.each_op() for facts in [info(n)] for size in facts.shape if size.free_symbols} <= {
        B, 8 * B,
    }  # fmt: skip


def test_a_model_of_any_length_is_not_fixed() -> None:
    assert planned().program.fixed_length is not None
    cut = type("Cut", (models.FixedTable,), {"forward": _cut})
    assert trace(cut(), models.INPUTS, torch.float32).fixed_length is None


def _cut(self: models.FixedTable, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    x = self.emb(ids) + self.pos[: ids.shape[1]]
    return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("asked", [{"sequence": 16}, {"sequence": 4}, {"pad_to_multiple_of": 3}])
def test_other_lengths_are_refused(asked: dict[str, int]) -> None:
    with pytest.raises(PlanError, match=r"sequence=.*: use 8, .*" + LINE):
        planned(**asked)


def test_cp_is_refused() -> None:
    with pytest.raises(PlanError, match="cp=2 would cut the sequence: use cp=1.*" + LINE):
        planned(dp=1, cp=2)
    with pytest.raises(PlanError, match="attention='ring' would cut the sequence.*" + LINE):
        planned(attention="ring")
    job = planned().job
    few = replace(job, batch=replace(job.batch, global_batch=1, sequence=1 << 20))
    assert cp_sizes(planned().program, few, Pins()) == [1], "it is not looked at unasked"


def test_a_plan_that_was_edited_is_refused() -> None:
    result = planned()
    with pytest.raises(PlanError, match="sequence=16: use 8.*" + LINE):
        result.source(result.plan.changed(sequence=16))
    with pytest.raises(PlanError, match="cp=2 would cut the sequence.*" + LINE):
        result.source(result.plan.changed(mesh=Mesh(cp=2)))
