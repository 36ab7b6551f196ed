"""split_complex: complex values become pairs of real ones, their products are written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.compile.compiler import prepare
from autopar.ir.graph import Program, info
from tests.interpreter import run_program


class Turned(nn.Module):
    """What users do with complex numbers: each line is an op that has a form of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table: Tensor
        self.register_buffer("table", torch.polar(torch.rand(5, 4), torch.rand(5, 4)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = torch.view_as_complex(self.linear(x).unflatten(-1, (4, 2)))
        z = z * self.table[1:2] * 3.0 * x[:, :4].abs()
        z = z.unsqueeze(1).expand(-1, 3, -1).transpose(-1, -2)[:, :, 1]
        w = torch.polar(x[:, 4:].abs(), x[:, :4]) * z
        pairs = torch.view_as_real(w).flatten(1)
        return (pairs - y).square().mean() + w.real.mean() + (w.imag * x[:, :4]).mean()


class Transformed(nn.Module):
    """A Fourier transform has no form of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mixed: Tensor = torch.fft.fft(self.linear(x), dim=-1).real
        return (mixed - y).square().mean()


class TurnedByRight(Transformed):
    """A factor of 1j has no form of pairs."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = torch.view_as_complex(self.linear(x).unflatten(-1, (4, 2))) * 1j
        return (torch.view_as_real(z).flatten(1) - y).square().mean()


class MadeComplex(Transformed):
    """Nor has a cast of real numbers."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = torch.view_as_complex(self.linear(x).unflatten(-1, (4, 2))) * x[:, :4].to(torch.complex128)
        return (torch.view_as_real(z).flatten(1) - y).square().mean()


INPUTS = {"x": torch.randn(3, 8, dtype=torch.float64), "y": torch.randn(3, 8, dtype=torch.float64)}


def _complex_ops(program: Program) -> list[Any]:
    return [node for _, node in program.each_op() if info(node).dtype.is_complex]


@pytest.mark.parametrize("kind", [Turned, Transformed, TurnedByRight, MadeComplex])
def test_loss_and_gradients_are_the_models(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind().double()
    if isinstance(model, Turned):
        model.table = model.table.to(torch.complex128)  # which `double` leaves, and the program raises
    program = prepare(model, INPUTS, "fp64")
    expected, loss = model(**INPUTS), run_program(program, model, INPUTS)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    names, parameters = zip(*model.named_parameters(), strict=True)
    for name, mine, theirs in zip(
        names, torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12, msg=name)
    assert bool(_complex_ops(program)) == (kind is not Turned)


def test_a_complex_value_that_stays_has_a_gradient() -> None:
    program = prepare(Transformed(), INPUTS, "fp32")
    assert all(info(node).requires_grad for node in _complex_ops(program))
    losses = [info(node).requires_grad for block, node in program.each_op() if node in block.results]
    assert losses and any(losses)
