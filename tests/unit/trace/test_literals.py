"""Numbers that forward writes as lists: no constant, which on meta would have no value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.trace.export import trace
from tests.interpreter import run_program

INDICES = {
    "last but one": (slice(None), [-2]),
    "last": (..., [-1]),
    "run": ([1, 2],),
    "to the end": (slice(None), [-3, -2, -1]),
    "out of order": (slice(None), [2, 0]),
    "pairs": ([0, 1], [1, 2]),
    "none": (slice(None), []),
}


class Indexed(nn.Module):
    def __init__(self, index: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        table = torch.tensor([[0.5, 2.0], [1.0, 3.0]], device=x.device)
        return (self.weight[self.index].sum() * x).mean() + table[1, [0, 1]].sum()


@pytest.mark.parametrize("index", INDICES)
def test_lists_of_numbers(index: str) -> None:
    model = Indexed(INDICES[index])
    batch = {"x": torch.randn(3, 5)}
    program = trace(model, batch, torch.float32)
    assert not program.buffers
    torch.testing.assert_close(run_program(program, model, batch), model(**batch))


class Halves(nn.Module):
    """Of a batch twice as large, after an empty cache; a hook of the user's gives the inputs another length."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5))
        self.register_forward_pre_hook(self.cut, with_kwargs=True)

    def cut(self, model: nn.Module, args: Any, inputs: dict[str, Tensor]) -> Any:
        return args, {"x": inputs["x"][:, 1:], "y": inputs["y"]}

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        both = torch.cat([torch.tensor([], device=x.device), torch.cat([x * self.weight, y[:, 1:]])], dim=1)
        one, other = both.chunk(2)
        return (one * other).mean()


def test_halves_of_a_batch() -> None:
    model = Halves()
    batch = {"x": torch.randn(3, 6), "y": torch.randn(3, 6)}
    program = trace(model, batch, torch.float32)
    assert "aten.split_with_sizes.default" in {str(node.target) for _, node in program.each_op()}
    torch.testing.assert_close(run_program(program, model, batch), model(**batch))
