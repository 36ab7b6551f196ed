"""In-place ops: random programs of views and writes against eager, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.ir.graph import MODEL, Program
from autopar.trace.export import trace
from autopar.trace.inplace import mutates
from tests.interpreter import run_program

Step = Callable[[list[Tensor], random.Random], None]


def _like(x: Tensor, source: Tensor) -> Tensor:
    """A tensor of x's shape that depends on `source`."""
    return source.sum() * torch.ones_like(x)


def _view(tensors: list[Tensor], choose: random.Random) -> None:
    x = choose.choice(tensors)
    kinds: list[Callable[[], Tensor]] = [
        lambda: x.reshape(-1),
        lambda: x.reshape(-1).contiguous(),
        lambda: x.to(x.dtype),
        lambda: x.flatten(),
        lambda: x.unsqueeze(0),
        lambda: x[1:],
        lambda: x[..., :-1],
        lambda: x[..., 1:3],
        lambda: x[::2],
        lambda: x[0],
        lambda: x.select(-1, -1),
        lambda: x.transpose(0, -1),
        lambda: x.permute(*reversed(range(x.dim()))),
        lambda: x.narrow(0, 0, 2),
        lambda: x.squeeze(),
    ]
    if x.dim() and min(x.shape) > 3:
        tensors.append(choose.choice(kinds)())


def _compute(tensors: list[Tensor], choose: random.Random) -> None:
    x = choose.choice(tensors)
    tensors.append(choose.choice([x * 1.5, -x, x.clone(), x + 1]))


def _write(tensors: list[Tensor], choose: random.Random) -> None:
    x, y = choose.choice(tensors), choose.choice(tensors)
    where = torch.zeros_like(x, dtype=torch.bool)
    kinds: list[Callable[[], object]] = [
        lambda: x.mul_(0.5),
        lambda: x.add_(_like(x, y), alpha=0.1),
        lambda: x.div_(3.0),
        lambda: x.copy_(_like(x, y.detach())),
        lambda: x.fill_(0.25),
        lambda: x.zero_(),
        lambda: x.neg_(),
        lambda: x.masked_fill_(where, 1.0),
        lambda: x.copy_(y.mean()),
    ]
    choose.choice(kinds)()


def _steps(seed: int) -> list[Step]:
    return random.Random(seed).choices([_view, _compute, _write], weights=[3, 1, 3], k=14)


class RandomWrites(nn.Module):
    """Ops that save nothing for backward: eager refuses to change what it has saved."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.weight = nn.Parameter(torch.randn(6, 5, 7))

    def forward(self, x: Tensor) -> Tensor:
        choose = random.Random(self.seed)
        tensors = [self.weight * x.mean(), self.weight.detach() + x.mean(), torch.zeros_like(self.weight)]
        for step in _steps(self.seed):
            step(tensors, choose)
        return torch.stack([(t * (i + 1)).sum() for i, t in enumerate(tensors)]).sum()


def _traced(model: nn.Module, x: Tensor) -> Program:
    program = trace(model, {"x": x}, torch.float64)
    assert not any(mutates(node) for node in program.blocks[MODEL].ops)
    return program


@pytest.mark.parametrize("seed", range(24))
def test_random_views_and_writes(seed: int) -> None:
    """Loss and gradients as eager computes them; nothing in the program writes in place."""
    torch.manual_seed(seed)
    model, x = RandomWrites(seed).double(), torch.randn(5, 4, 6, dtype=torch.float64)
    expected = model(x)
    expected.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss = run_program(_traced(model, x), model, {"x": x})
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    if loss.requires_grad:
        loss.backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(mine, torch.zeros_like(mine) if gradient is None else gradient, rtol=1e-12, atol=0)


class Writes(nn.Module):
    def __init__(self, write: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.write = write
        self.weight = nn.Parameter(torch.ones(6))
        self.register_buffer("steps", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self, x).sum()


def _input(model: Any, x: Tensor) -> Any:
    return x.mul_(2) * model.weight


def _buffer(model: Any, x: Tensor) -> Any:
    model.steps.add_(1)
    return x * model.weight


def _parameter(model: Any, x: Tensor) -> Any:
    with torch.no_grad():
        model.weight.mul_(0.9)
    return x * model.weight


def _detached(model: Any, x: Tensor) -> Any:
    y = x * model.weight
    y.detach().mul_(2)
    return y


def _data(model: Any, x: Tensor) -> Any:
    y = x * model.weight
    y.data.mul_(2)
    return y


def _without_gradients(model: Any, x: Tensor) -> Any:
    y = x * model.weight
    with torch.no_grad():
        y.mul_(2)
    return y


@pytest.mark.parametrize(
    ("write", "what"),
    [
        (_input, "the input x"),
        (_buffer, "the buffer steps"),
        (_parameter, "parameter weight"),
        (_detached, "behind the back of autograd"),
        (_data, "behind the back of autograd"),
        (_without_gradients, "behind the back of autograd"),
    ],
)
def test_refused(write: Callable[[nn.Module, Tensor], Tensor], what: str) -> None:
    """State that outlives the forward, and changes that autograd does not see; with the line."""
    with pytest.raises(TraceError, match=what) as error:
        trace(Writes(write), {"x": torch.ones(3, 6)}, torch.float64)
    assert f"{write.__code__.co_filename}:" in str(error.value)


class Regions(nn.Module):
    """No gradient flows through a no_grad region; an fp32 island under bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            scale = y.abs().amax(-1, keepdim=True)
            scale.add_(1.0)
            same = y
        with torch.autocast("cpu", enabled=False):
            island = (y.float() / scale.float()).softmax(-1).to(y.dtype)
        z = torch.zeros_like(island)
        z[:, 1:] = island[:, :-1] * torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=x.dtype, device=x.device)
        total: Tensor = (z * same).sum()
        return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_t8_regions(dtype: torch.dtype) -> None:
    """T8: the casts around a region without autocast are those of eager, op by op."""
    model, x = Regions().to(dtype), torch.randn(3, 4, 6, dtype=dtype)
    expected = model(x)
    expected.backward()
    gradient = model.linear.weight.grad
    model.zero_grad()
    loss = run_program(_traced_in(model, x, dtype), model, {"x": x})
    loss.backward()
    if dtype == torch.bfloat16:
        assert torch.equal(loss, expected) and torch.equal(model.linear.weight.grad, gradient)  # type: ignore[arg-type]
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model.linear.weight.grad, gradient)


def _traced_in(model: nn.Module, x: Tensor, dtype: torch.dtype) -> Program:
    return trace(model, {"x": x}, dtype)


def test_running_statistics_are_recorded() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model

        def forward(self, x: Tensor) -> Tensor:
            mean: Tensor = self.body(x).mean()
            return mean

    images = {"x": torch.zeros(2, 3, 8, 8)}
    with pytest.raises(TraceError, match=r"batch_norm='synchronise'"):
        trace(Mean(), images, torch.float32)
    program = trace(Mean(), images, torch.float32, batch_norm="synchronise")
    assert set(program.mutated) == {f"body.1.{n}" for n in ("num_batches_tracked", "running_mean", "running_var")}
    assert {"body.1.running_mean", "body.1.running_var"} <= set(program.buffers)
