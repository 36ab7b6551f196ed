"""S4: however a fused projection is read, no rank holds a piece of [q; k; v]; tp=2 computes what tp=1 does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.compile.compiler import compile_program, prepare
from autopar.ir.graph import B, Program, S, info, node_inputs
from autopar.placement import Shard
from autopar.plan.plan import Plan, Solution
from autopar.rules import TensorAxis
from autopar.runtime.choices import Mesh
from autopar.search.intra_op import solve
from autopar.search.layouts import FREE, MEGATRON, MEGATRON_SP, Layout
from autopar.verification.parity import relative_errors
from tests.models import RandomCosts
from tests.numerics.spmd import run_program

HEADS, WIDTH, TOKENS, BATCH, VOCABULARY = 4, 16, 6, 2, 24
VALUES = {B: BATCH, S: TOKENS}
Parts = tuple[Tensor, Tensor, Tensor]


def heads(x: Tensor) -> Tensor:
    b, s, _ = x.shape
    return x.view(b, s, HEADS, WIDTH // HEADS).transpose(1, 2)


def _sliced(y: Tensor) -> Parts:
    return heads(y[..., :WIDTH]), heads(y[..., WIDTH : 2 * WIDTH]), heads(y[..., 2 * WIDTH :])


def _split(y: Tensor, sizes: Any) -> Parts:
    q, k, v = map(heads, y.split(sizes, -1))
    return q, k, v


def _chunked(y: Tensor) -> Parts:
    q, k, v = map(heads, y.chunk(3, dim=2))
    return q, k, v


def _unbound(y: Tensor) -> Parts:
    b, s, _ = y.shape
    q, k, v = y.reshape(b, s, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def _selected(y: Tensor) -> Parts:
    b, s, _ = y.shape
    parts = y.view(b, s, 3, HEADS, -1)
    return parts[:, :, 0].transpose(1, 2), parts[:, :, 1].transpose(1, 2), parts[:, :, 2].transpose(1, 2)


def _by_head(y: Tensor) -> Parts:
    """[heads, 3, e]: each head's q, k and v lie together (GPT-NeoX, BLOOM); the weight is whole, its heads shard."""
    b, s, _ = y.shape
    q, k, v = y.view(b, s, HEADS, -1).transpose(1, 2).chunk(3, -1)
    return q, k, v


SPELLINGS: dict[str, Callable[[Tensor], Parts]] = {
    "slicing": _sliced,
    "split": lambda y: _split(y, WIDTH),
    "split_with_sizes": lambda y: _split(y, [WIDTH, WIDTH, WIDTH]),
    "chunk": _chunked,
    "unbind": _unbound,
    "select": _selected,
    "by_head": _by_head,
}


class Layer(nn.Module):
    def __init__(self, parts: Callable[[Tensor], Parts], transposed: bool) -> None:
        super().__init__()
        self.parts, self.transposed = parts, transposed
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        if transposed:
            self.qkv.weight = nn.Parameter(self.qkv.weight.detach().t().contiguous())
        self.out = nn.Linear(WIDTH, WIDTH)
        self.gate_up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        if self.transposed:  # Conv1D of transformers
            y = torch.addmm(self.qkv.bias, x.view(-1, d), self.qkv.weight).view(b, s, 3 * d)
        else:
            y = self.qkv(x)
        q, k, v = self.parts(y)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d)
        x = x + self.out(attended)
        gate, up = self.gate_up(x).chunk(2, -1)
        result: Tensor = x + self.down(F.silu(gate) * up)
        return result


class Model(nn.Module):
    def __init__(self, parts: Callable[[Tensor], Parts], transposed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(parts, transposed) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@cache
def traced(spelling: str, transposed: bool) -> tuple[nn.Module, Program, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Model(SPELLINGS[spelling], transposed).double()
    ids, labels = torch.randint(VOCABULARY, (2, BATCH, TOKENS))
    batch = {"input_ids": ids, "labels": labels}
    return model, prepare(model, batch, "fp64"), batch


def compiled(program: Program, layout: Layout, tp: int) -> Program:
    axis = TensorAxis(tp, VALUES, layout.sequence)
    solution: Solution = solve(program, axis, RandomCosts(0), layout)
    plan = Plan.of(Mesh(tp=tp), BATCH, BATCH, TOKENS, ((0, 2),), precision="fp64", solution=solution)
    return compile_program(program, plan)


@pytest.mark.parametrize("layout", [MEGATRON_SP, FREE], ids=lambda layout: layout.name)
@pytest.mark.parametrize(("spelling", "transposed"), [*((name, False) for name in SPELLINGS), ("split", True)])
def test_two_ranks_compute_what_one_does(spelling: str, transposed: bool, layout: Layout) -> None:
    model, program, batch = traced(spelling, transposed)
    model = copy.deepcopy(model)
    program = compiled(program, layout, 2)
    found = {name: p.detach() for name, p in model.named_parameters()}
    for name, fused in program.fused.items():
        sizes = [int(program.parameters[part].shape[fused.dim]) for part in fused.parts]
        found.update(zip(fused.parts, found[name].split(sizes, fused.dim), strict=True))
    found["_count"] = torch.tensor(float(BATCH * TOKENS), dtype=torch.float64)
    loss, gradients = run_program(program, 2, found, batch, VALUES)
    for name, fused in program.fused.items():
        gradients[name] = torch.cat([gradients.pop(part) for part in fused.parts], fused.dim)
    expected: Any = model(**batch)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=0)
    errors = relative_errors(gradients, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert max(errors.values()) < 1e-9, max(errors, key=lambda n: errors[n])


@pytest.mark.parametrize("spelling", [name for name in SPELLINGS if name != "by_head"])
def test_each_part_is_a_parameter_whose_shard_is_its_own(spelling: str) -> None:
    _, program, _ = traced(spelling, False)
    assert len(program.fused["layers.0.qkv.weight"].parts) == 3
    assert len(program.fused["layers.0.gate_up.weight"].parts) == 2
    layer = compiled(program, MEGATRON, 2).blocks["Layer"]
    products = [info(n).strategy for n in layer.ops if n.target is torch.ops.aten.linear.default]
    assert len(products) == 7
    assert all(strategy is not None and strategy.inputs[1].is_shard for strategy in products)
    attention = [n for n in layer.ops if n.target is torch.ops.aten.scaled_dot_product_attention.default]
    assert [info(n).placement for n in node_inputs(attention[0])] == [Shard(1)] * 3
