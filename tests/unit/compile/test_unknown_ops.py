"""T12: an op without a rule is replicated, and named with what that costs."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compile.notes import warn_unknown
from tests.passes.programs import read

TEXT = """
block model:
  x: [b, s, 8] = value 0
  w: [3, 8] = parameter w
  h: [b, s, 8] = relu(x)
  y: [b, s, 3] = cdist(h, w)
  return y
"""


def test_an_op_without_a_rule_is_named_with_its_cost() -> None:
    with pytest.warns(UserWarning, match=r"cdist at y has no sharding rule: it is replicated on tp \(\d\d\.\d% of"):
        warn_unknown(read(TEXT), 64)


def test_ops_with_rules_are_not_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_unknown(read(TEXT.replace("cdist(h, w)", "linear(h, w)")), 64)


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 3 * gradients[0]


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Tripled.apply(x)  # type: ignore[no-untyped-call]
        return result


class Unusual(nn.Module):
    """torch.full, torch.einsum, an op without a rule, and a custom autograd.Function in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.scaled, self.points = Scaled(), nn.Parameter(torch.ones(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.scaled(layer(x) + torch.full((8,), 0.5, dtype=x.dtype, device=x.device))
        near = torch.cdist(x, self.points, compute_mode="donot_use_mm_for_euclid_dist")
        loss: Tensor = torch.einsum("bi,ji->bj", near, self.points[:, :4]).square().sum()
        return loss


def test_t12_unusual_ops_are_planned_and_named() -> None:
    """T12: never a KeyError. Full and einsum have rules; cdist is named; the function is kept whole."""
    with pytest.warns(UserWarning, match=r"cdist at \S+ has no sharding rule"):
        result = autopar.parallelize(
            Unusual(), 2, gpu="cpu", inputs={"x": torch.randn(4, 8)}, global_batch=4, tp=2, precision="fp32"
        )
    assert "opaque: Tripled (an autograd.Function)" in str(result)
    source = result.source()
    assert "torch.einsum" in source and "torch.ops.aten.cdist.default(" in source and "torch.full" in source
