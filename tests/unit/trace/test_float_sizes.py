"""Floats of sizes: a polynomial is kept as it is, a quotient refused; neither is fixed to the example's size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.ir.graph import B
from autopar.trace.export import trace


class _Sized(nn.Module):
    def __init__(self, loss: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(3, 3), loss

    def forward(self, x: Tensor) -> Tensor:
        rows = 0.0
        for _ in range(4):
            rows = rows + x.shape[0]
        return self.loss(self.linear(x), rows)


def _argument(loss: Callable[[Tensor, float], Tensor]) -> object:
    program = trace(_Sized(loss), {"x": torch.zeros(2, 3)}, torch.float32)
    return program.blocks["model"].ops[-1].args[1]


def test_a_float_sum_of_sizes_stays_symbolic() -> None:
    assert _argument(lambda y, rows: y.sum() / rows) == 4 * B
    assert _argument(lambda y, rows: y.sum() * (rows + 1)) == 4 * B + 1
    assert _argument(lambda y, rows: y.sum() * 0.5) == 0.5


@pytest.mark.parametrize("factor", [lambda rows: 1 / rows, lambda rows: rows * 0.125, lambda rows: rows**0.5])
def test_a_quotient_of_sizes_is_refused_with_the_way_out(factor: Callable[[float], float]) -> None:
    with pytest.raises(TraceError, match=r"is a float of sizes(.|\n)*divide a tensor by the size"):
        _argument(lambda y, rows: y.sum() * factor(rows))
