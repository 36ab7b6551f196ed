"""The data axis: what couples samples is named, and restricts the plans; the rest adds up over parts of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.compile.compiler import compile_program
from autopar.errors import PlanError, TypeCheckError
from autopar.ir.build import replace_node
from autopar.ir.graph import Program, node_inputs
from autopar.ir.ops import COLLECTIVES, is_collective
from autopar.placement import Shard
from autopar.plan.plan import Plan
from autopar.rules import DataAxis
from autopar.rules.data_axis import moved_rows
from autopar.rules.spread import data_types
from autopar.rules.verify import Level, verify
from autopar.runtime.choices import Mesh
from tests.models import gpt, layered, llama
from tests.passes.programs import read


class _Plain(nn.Module):
    """x [b, 8], labels [b] → loss; the models below differ in one line of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(8, 16), nn.Linear(16, 5)

    def logits(self, x: Tensor) -> Tensor:  # [b, 8] -> [b, 5]
        logits: Tensor = self.out(torch.tanh(self.up(x)))
        return logits

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x), labels)


class _Centred(_Plain):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(x)
        return F.cross_entropy(logits - logits.mean(0), labels)


class _Contrast(_Plain):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.up(x)
        return F.cross_entropy(h @ h.T, labels)


class _Root(_Plain):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(self.logits(x), labels)
        return loss.sqrt()


class _SoftmaxOverSamples(_Plain):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(x)
        return F.cross_entropy(torch.softmax(logits, 0), labels)


class _BatchSize(_Plain):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss, penalty = F.cross_entropy(self.logits(x), labels), self.logits(x).pow(2).sum()
        return loss + penalty / x.shape[0]


class _Constant(_Plain):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(self.logits(x), labels)
        return loss + 1.0


class _Flipped(_Plain):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(x)
        return F.cross_entropy(logits.flip(0), labels)


class _OfWeights(_Plain):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(self.logits(x), labels)
        return loss + self.out.weight.pow(2).sum()


class _ByFrequency(_Plain):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 16, scale_grad_by_freq=True)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x) + self.out(self.table(labels)), labels)


class _Pair(_Plain):
    """Two views of each sample one after the other: rows of a rank lie in two runs, and labels with them."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        both = torch.cat([self.logits(x), self.logits(-x)])
        return F.cross_entropy(both, torch.cat([labels, labels]))


class _CrossedPair(_Plain):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        both = torch.cat([self.logits(x), self.logits(-x)])
        return F.cross_entropy(both, labels.repeat_interleave(2))


class _Interleaved(_Plain):
    """Rows [b·2] and [2·b] are other samples on each rank: what is added must be of the same."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(x)
        by_sample = torch.cat([logits, logits], 1).reshape(-1, 5)
        by_view = torch.cat([logits, logits])
        return F.mse_loss(by_sample, by_view)


def _traced(model: nn.Module) -> Program:
    return layered(model, {"x": torch.zeros(4, 8), "labels": torch.zeros(4, dtype=torch.long)})


def _line(model: type[nn.Module]) -> str:
    lines, first = inspect.getsourcelines(model.forward)
    return f"test_data_axis.py:{first + len(lines) - 1}"


@pytest.mark.parametrize("model", [_Interleaved])
def test_what_no_gather_mends_leaves_one_micro_batch_on_one_replica(model: type[_Plain]) -> None:
    """The last line of each forward: over parts of a batch it would not add up to what it is of the whole."""
    coupling = data_types(_traced(model())).coupling
    assert coupling is not None and not coupling.replicas
    assert _line(model) in coupling.short
    assert f"{_line(model)})" in coupling.detail and "    > " in coupling.detail, "the graph around it"


@pytest.mark.parametrize("model", [_Centred, _Root, _Contrast, _SoftmaxOverSamples, _Flipped, _ByFrequency])
def test_numbers_and_samples_of_the_whole_batch_allow_replicas_but_no_micro_batches(model: type[_Plain]) -> None:
    coupling = data_types(_traced(model())).coupling
    assert coupling is not None and coupling.replicas
    assert (
        str(coupling)
        == f"loss couples samples at {inspect.getfile(model)}:{_line(model).split(':')[1]}: one micro-batch"
    )


@pytest.mark.parametrize("model", [_Plain, _BatchSize, _Pair, _Constant, _OfWeights])
def test_independent_samples_are_spread_freely(model: type[_Plain]) -> None:
    assert data_types(_traced(model())).coupling is None


@pytest.mark.parametrize("model", [gpt, llama], ids=lambda f: f.__name__)
def test_models_of_independent_samples_are_spread_freely(model: Callable[[], tuple[nn.Module, Program]]) -> None:
    assert data_types(model()[1]).coupling is None


def _plan(dp: int = 1, micro_batch: int = 4) -> Plan:
    return Plan.of(Mesh(dp=dp), 4, micro_batch, 1, ((0, 1),), precision="fp64")


def test_a_plan_that_would_change_the_model_is_refused_with_the_way_out() -> None:
    program = _traced(_Interleaved())
    compile_program(program, _plan())
    for plan in (_plan(micro_batch=2), _plan(dp=2, micro_batch=2)):
        with pytest.raises(PlanError, match=r"couples samples(.|\n)*use dp=1, micro_batch=global_batch"):
            compile_program(program, plan)
    with pytest.raises(PlanError, match="use micro_batch=global_batch/dp"):
        compile_program(_traced(_Root()), _plan(micro_batch=2))


@pytest.mark.parametrize("wrong", ["missing", "grad_from_first", "all_reduce_both"])
def test_a_missing_or_wrong_conversion_over_dp_is_an_error(wrong: str) -> None:
    program = compile_program(_traced(_Root()), _plan(dp=2, micro_batch=2))
    verify(program, Level.LOWERED, [DataAxis()])
    found = [n for _, n in program.each_op() if is_collective(n.target) and n.kwargs["axis"] == "dp"]
    assert [n.target.__name__ for n in found] == ["all_reduce", "value_from_first"]  # type: ignore[union-attr]
    if wrong == "missing":
        replace_node(found[0], node_inputs(found[0])[0])
    else:
        found[0].target = COLLECTIVES[wrong]
    with pytest.raises(TypeCheckError):
        verify(program, Level.LOWERED, [DataAxis()])


@pytest.mark.parametrize(
    ("cut", "runs"),
    [("0, b", "1"), ("b, 3*b", "2"), ("b", "2"), ("0, b, 2", ""), ("0, -1", ""), ("0, 1", ""), ("0, 2*b", "2")],
)
def test_a_slice_of_whole_runs_of_a_batch_keeps_its_samples(cut: str, runs: str) -> None:
    """x is [3·b, 8] in three runs of b rows on each part of a batch."""
    text = f"block model:\n  x: [3*b, 8] = value 0\n  y: [b, 8] = slice.Tensor(x, 0, {cut})\n  return y"
    (node,) = read(text).blocks["model"].ops
    strategy = moved_rows(node, (replace(Shard(0), runs=sympy.Integer(3)),))
    assert ("" if strategy is None else str(strategy.output.runs)) == runs
