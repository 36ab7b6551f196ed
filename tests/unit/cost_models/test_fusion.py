"""Compiled layers: which ops are one kernel, and what that moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.compile.compiler import prepare
from autopar.cost_models.describe import describe
from autopar.cost_models.layer_costs import LayerCosts
from autopar.ir.graph import B, S
from autopar.plan.plan import Plan
from autopar.search.layouts import replicated

WIDTH, TOKENS = 8, 2 * 16
VALUES = {B: 2, S: 16}
ROW = 4 * TOKENS * WIDTH  # bytes of one fp32 activation


class Model(nn.Module):
    def __init__(self, body: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Layer(body) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(F.linear(x, self.embedding.weight).flatten(0, 1), labels.flatten())


class Layer(nn.Module):
    def __init__(self, body: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.linear = body, nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.linear, x)


def layer(body: Callable[[nn.Linear, Tensor], Tensor], compiled: bool = True) -> LayerCosts:
    ids = torch.zeros(2, 16, dtype=torch.long)
    program = prepare(Model(body), {"input_ids": ids, "labels": ids}, "fp32")
    (found,) = describe(program, replicated(program), VALUES, compiled).classes.values()
    return found


def memory(costs: LayerCosts) -> tuple[float, float, float]:
    """(bytes forward, bytes backward, kernels forward) of what is no product."""
    ops = [op for op in costs.ops if op.kind == "memory"]
    forward, backward = (
        sum(float(size.subs(VALUES)) for size in sizes)
        for sizes in ([op.forward_bytes for op in ops], [op.backward_bytes for op in ops])
    )
    launches = sum(float(op.launches[0]) if op.launches else 1.0 for op in ops)
    return forward, backward, launches


def test_a_chain_reads_its_input_and_writes_its_output_once() -> None:
    """norm → gelu → square: forward 1 + 1; backward the input again, the gradient of the result, that of the input."""

    def body(linear: nn.Linear, x: Tensor) -> Tensor:
        result: Tensor = linear(F.gelu(F.layer_norm(x, (WIDTH,))).square())
        return result

    assert memory(layer(body)) == pytest.approx((2 * ROW, 3 * ROW, 1))
    forward, _, launches = memory(layer(body, compiled=False))
    assert forward == 6 * ROW and launches == 3


def test_a_product_parts_two_kernels() -> None:
    """The residual x is read before and after: the second kernel reads it again, with the product's result."""

    def body(linear: nn.Linear, x: Tensor) -> Tensor:
        return F.gelu(x + linear(F.gelu(x)))

    assert memory(layer(body)) == pytest.approx(((2 + 3) * ROW, (3 + 5) * ROW, 2))


def test_a_value_that_is_read_later_is_written_once() -> None:
    def body(linear: nn.Linear, x: Tensor) -> Tensor:
        y = x.sigmoid()
        result: Tensor = y + linear(y.exp())
        return result

    # First kernel: reads x, writes y and exp(y); second: reads y and the product, writes the sum.
    assert memory(layer(body))[0] == pytest.approx((3 + 3) * ROW)


def test_products_are_priced_as_without_compile() -> None:
    def body(linear: nn.Linear, x: Tensor) -> Tensor:
        return F.gelu(linear(x))

    plain, compiled = ([op for op in layer(body, on).ops if op.kind == "matmul"] for on in (False, True))
    assert plain == compiled
    assert layer(body).saved_bytes == layer(body, False).saved_bytes


def test_the_plan_says_so() -> None:
    """In model.py, in plan.yaml, and beside the ledger."""
    ids = torch.zeros(2, 16, dtype=torch.long)
    given = {"input_ids": ids, "labels": ids}
    model = Model(lambda linear, x: x + F.gelu(linear(F.layer_norm(x, (WIDTH,)))))
    eager, compiled = (
        autopar.parallelize(model, gpus=1, gpu="h100-sxm-80gb", inputs=given, global_batch=2, compile=on)
        for on in (False, True)
    )
    assert compiled.plan.compute.compile and not eager.plan.compute.compile
    assert "compile=True," in compiled.source() and "compile" not in eager.source()
    assert Plan.from_dict(compiled.plan.to_dict()).compute.compile
    assert "priced as one kernel" in compiled.explain() and "one kernel" not in eager.explain()
    assert compiled.estimate.step_time_s < eager.estimate.step_time_s
