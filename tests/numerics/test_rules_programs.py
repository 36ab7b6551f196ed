"""Whole models under random plans, ranks as a loop: rules, solver and passes together, without a process.

Random costs give random legal placements, which use every strategy and conversion sooner or later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.compile.compiler import compile_program
from autopar.ir.graph import B, Program, S
from autopar.placement import CONVERSIONS
from autopar.plan.plan import Plan, Solution
from autopar.rules import TensorAxis
from autopar.runtime.choices import Mesh
from autopar.runtime.precision import raise_float32
from autopar.search.intra_op import solve
from autopar.search.layouts import FREE, MEGATRON, MEGATRON_SP, Layout
from autopar.verification.parity import relative_errors
from examples.gpt import GPT
from tests.models import VOCABULARY, RandomCosts, gpt, llama, qwen2
from tests.numerics.spmd import run_program

BATCH, SEQUENCE = 2, 12
VALUES = {B: BATCH, S: SEQUENCE}
MODELS: dict[str, Callable[[], tuple[nn.Module, Program]]] = {"gpt": gpt, "llama": llama, "qwen2": qwen2}


def _solution(program: Program, tp: int, layout: Layout, seed: int) -> Solution:
    return solve(program, TensorAxis(tp, VALUES, layout.sequence), RandomCosts(seed), layout)


def _compiled(program: Program, solution: Solution) -> Program:
    stages = ((0, len(program.layer_calls)),)
    plan = Plan.of(Mesh(tp=solution.ranks), BATCH, BATCH, SEQUENCE, stages, precision="fp64", solution=solution)
    return compile_program(program, plan)


def _batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(VOCABULARY, (2, BATCH, SEQUENCE), generator=generator)
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def _reference(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    with raise_float32():
        result: Any = model(**batch)
        loss = result if isinstance(result, Tensor) else result.loss
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _tensors(model: nn.Module, program: Program, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters, parts of fused ones, buffers, and the count of targets of the loss."""
    found = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    for name, fused in program.fused.items():
        sizes = [int(program.parameters[part].shape[fused.dim]) for part in fused.parts]
        found.update(zip(fused.parts, found[name].split(sizes, fused.dim), strict=True))
    labels = batch["labels"]
    targets = labels if isinstance(model, GPT) else labels[:, 1:]  # Hugging Face shifts them
    return {**found, **dict(model.named_buffers()), "_count": (targets != -100).sum().double()}


def _original(program: Program, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    whole = dict(gradients)
    for name, fused in program.fused.items():
        whole[name] = torch.cat([whole.pop(part) for part in fused.parts], fused.dim)
    return whole


def _check(name: str, tp: int, layout: Layout, seed: int) -> set[str]:
    """Run one random plan against the original; the conversions it used."""
    model, program = MODELS[name]()
    model, batch = model.double(), _batch()
    compiled = _compiled(program, _solution(program, tp, layout, seed))
    loss, gradients = run_program(compiled, tp, _tensors(model, program, batch), batch, VALUES)
    expected_loss, expected = _reference(model, batch)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-9, atol=0)
    errors = relative_errors(_original(program, gradients), expected)
    assert max(errors.values()) < 1e-9, max(errors, key=lambda n: errors[n])
    return {getattr(node.target, "__name__", "") for _, node in compiled.each_op()}


@pytest.mark.parametrize(
    ("name", "tp", "layout"),
    [
        ("gpt", 2, MEGATRON),
        ("gpt", 2, MEGATRON_SP),
        ("llama", 2, MEGATRON),
        ("qwen2", 2, MEGATRON_SP),
        ("llama", 4, MEGATRON_SP),  # 2 K/V heads on 4 ranks
    ],
)
def test_layouts(name: str, tp: int, layout: Layout) -> None:
    _check(name, tp, layout, seed=0)


@pytest.mark.parametrize("name", MODELS)
def test_random_plans(name: str) -> None:
    used = set().union(*(_check(name, 2 + seed % 2, FREE, seed) for seed in range(3)))
    assert len(used & {c.function for c in CONVERSIONS.values()}) > 6


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_many_random_plans(name: str) -> None:
    used = set().union(*(_check(name, 2 + seed % 3, FREE, seed) for seed in range(3, 40)))
    assert used >= {c.function for c in CONVERSIONS.values()} - {""}, "every conversion of the table"
