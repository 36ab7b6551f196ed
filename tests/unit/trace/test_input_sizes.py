"""For which sizes of its inputs a model is traced: relations, multiples, other lengths; or which line fixes one."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autopar import parallelize
from autopar.errors import PlanError, TraceError
from autopar.ir.graph import B, Program, S, Shape
from autopar.ir.lengths import check_multiple
from autopar.request import make_job
from autopar.search.job import illegal_sizes
from autopar.search.pins import Pins
from autopar.trace.export import trace
from autopar.trace.input_sizes import LONGEST, first_guess, other_lengths, sequence_length
from tests.first_hour import lengths as models
from tests.first_hour.case import ids


@cache
def traced(name: str) -> Program:
    case = next(case for case in models.CASES if case.name == name)
    return trace(case.build(), case.inputs, torch.float32)


@pytest.mark.parametrize(
    ("name", "inputs", "multiple", "lengths"),
    [
        ("waves", {"ids": (B, S), "labels": (B, S)}, 1, (2, 8)),
        ("patches", {"ids": (B, S), "labels": (B, S)}, 4, (8, LONGEST)),
        ("subsampled", {"frames": (B, 4 * S, 8), "labels": (B, S)}, 1, (2, LONGEST)),
        ("as_many_attributes", {"ids": (B, S), "attributes": (B, 8), "labels": (B, S)}, 1, (2, LONGEST)),
        ("unbatched", {"ids": (B, S), "labels": (B, S)}, 1, (2, LONGEST)),
    ],
)
def test_sizes_that_go_together(name: str, inputs: dict[str, Shape], multiple: int, lengths: tuple[int, int]) -> None:
    program = traced(name)
    assert {name: tensor.shape for name, tensor in program.inputs.items()} == inputs
    assert (program.sequence_multiple, program.sequence_range, program.fixed_length) == (multiple, lengths, None)


def test_the_sequence_is_the_length_of_most_integer_inputs() -> None:
    assert sequence_length({"ids": ids(8), "labels": ids(8), "attributes": ids(12)}) == 8
    assert sequence_length({"ids": ids(8), "attributes": ids(3)}) == 8
    assert sequence_length({"frames": torch.zeros(2, 32), "labels": ids(8)}) == 8
    assert sequence_length({"x": torch.zeros(2, 32), "y": torch.zeros(2, dtype=torch.long)}) == 0


def test_other_lengths_keep_the_divisors_of_the_first() -> None:
    assert other_lengths(8) == [7, 4, 16]
    assert other_lengths(12) == [11, 6, 8, 24]
    assert other_lengths(2) == [4]


def test_the_batch_is_none_of_the_users() -> None:
    assert first_guess({"ids": ids(4)}, torch.float32).values == {B: 3, S: 4}


def test_other_multiples_are_refused() -> None:
    """The plan, its padding and cp keep to the multiple."""
    job = make_job(
        models.Patches(), 2, gpu="cpu", memory=None, inputs=models.LM, loss=None, sequence=10, global_batch=8,
        optimizer=None, precision=None, batch_norm="refuse",
    )  # fmt: skip
    with pytest.raises(PlanError, match=r"sequence=10: 10 is not divisible by 4, .* use 8 or 12"):
        illegal_sizes(traced("patches"), job, Pins())
    with pytest.raises(PlanError, match="10 is not divisible by 4"):
        illegal_sizes(traced("patches"), replace(job, batch=replace(job.batch, sequence=12, padded_from=10)), Pins())
    check_multiple(4, "sequence=12", 12)
    with pytest.raises(PlanError, match=r"3 is not divisible by 4, .* use 4"):
        check_multiple(4, "sequence=3", 3)


class InEights(models.Model):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids)
        if ids.shape[1] % 8:
            x = x * 2
        return self.loss(x, labels)


class AtEight(models.Model):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids)
        if ids.shape[1] == 8:
            x = x * 2  # the line
        return self.loss(x, labels)


class Large(models.Model):
    """torch drops guards on products of two sizes."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(ids)
        if ids.shape[0] * ids.shape[1] > 100:
            x = x * 2  # the line
        return self.loss(x, labels)


def test_a_branch_on_multiples_is_taken_as_the_example_takes_it() -> None:
    program = trace(InEights(), models.LM, torch.float32)
    assert (program.sequence_multiple, program.sequence_range) == (8, (8, LONGEST))


def test_a_branch_on_one_length_is_taken_as_the_example_takes_it() -> None:
    """The program is that of this length alone, and says so with the line."""
    fixed = trace(AtEight(), models.LM, torch.float32).fixed_length
    assert fixed is not None
    assert re.search(rf"(?s)of 8 alone: for others .* at {__file__}:.*# the line\n.*Eq\(s, 8\)", str(fixed))


def test_a_branch_on_the_batch_is_refused_with_its_line() -> None:
    with pytest.raises(TraceError, match=rf"(?s)at {__file__}:.*# the line\n.*b\*s <= 100, .* b=2, s=100: derive it"):
        trace(Large(), models.LM, torch.float32)


class Deep(models.CausalBuffer):
    """So many layers that inner ones are stood in for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 48) for _ in range(7))


def test_deep_models_of_another_length() -> None:
    result = parallelize(Deep(), 1, gpu="cpu", inputs=models.LM, global_batch=2)
    assert result.program.sequence_range == (2, 8) and result.job.batch.sequence == 8
