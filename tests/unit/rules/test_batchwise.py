"""Ops without a rule, tried on halves of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.ir.graph import MODEL
from autopar.rules import DataAxis, TensorAxis, has_rule, is_known, rule_of, strategies
from autopar.rules.batchwise import _op, is_batchwise
from tests.passes.programs import read

DATA = DataAxis()


def op(text: str) -> Any:
    program = read(f"block model:\n  x: [b, s, 8] = value 0\n  w: [3, 8] = parameter w\n{text}\n  return y")
    return program.blocks[MODEL].ops[-1]


@pytest.mark.parametrize(
    "line",
    ["  y: [b, s, 3] = cdist(x, w)", "  y: [b, s, 8] = renorm(x, 2, 0, 1.0)"],  # the norm of each sample
)
def test_what_reads_each_sample_by_itself_passes_the_batch(line: str) -> None:
    node = op(line)
    assert not is_known(node) and has_rule(node)
    assert "S(0)" in {str(s.output) for s in strategies(node, rule_of(node), DATA)}
    assert not any(s.output.is_shard for s in strategies(node, rule_of(node), TensorAxis(2, sequence=True)))


@pytest.mark.parametrize(
    "line",
    [
        "  y: [b, s, 8] = renorm(x, 2, 1, 1.0)",  # norms over the batch
        "  y: [b, s, 8] = renorm(x, 2, 2, 1.0)",
        "  y: [b, s, s] = cdist(x, x, 2.0, 7)",  # fails to run
        "  y: [8, 8] = corrcoef(x)",  # no batch left
    ],
)
def test_what_couples_samples_does_not(line: str) -> None:
    node = op(line)
    assert not is_batchwise(node)
    assert not any(s.output.is_shard for s in strategies(node, rule_of(node), DATA))


def test_a_trial_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    node = op("  y: [b, s, 3] = cdist(x, w, 1.0)")
    assert is_batchwise(node)
    monkeypatch.setattr(torch, "allclose", None)
    assert is_batchwise(op("  y: [b, s, 3] = cdist(x, w, 1.0)"))


def test_a_trial_is_of_the_op_alone() -> None:
    """Not of the names around it, nor of one that another model had, with the gradients of other operands."""
    text = (
        "block model:\n  x: [b, s, 8] = value 0\n  w: [3, 8] = {kind} w\n"
        "  {name}: [b, s, 3] = cdist(x, w)\n  return {name}"
    )
    trained, renamed, fixed = (
        _op(read(text.format(kind=kind, name=name)).blocks[MODEL].ops[-1])
        for kind, name in (("parameter", "y"), ("parameter", "z"), ("buffer", "y"))
    )
    assert trained == renamed != fixed
