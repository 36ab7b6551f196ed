"""What a model of the first hour is: how to build it, what it takes, the pins it is planned with, its legal plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

PLANS: dict[str, dict[str, Any]] = {
    "as pinned": {},
    "dp2": {"dp": 2, "micro_batch": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "zero3": {"dp": 2, "zero": 3, "micro_batch": 2},
    "recompute": {"recompute": "full"},
    "one micro-batch": {"dp": 2, "zero": 1, "micro_batch": 4},
}
ALL = tuple(name for name in PLANS if name != "one micro-batch")
WITHOUT_PP = tuple(name for name in ALL if name != "pp2")
VOCABULARY = 64


@dataclass(frozen=True)
class Case:
    """A model with example inputs. pins: of the plan "as pinned"; plans: the names of those that are legal.

    slow: others of its kind are in `make test`.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Mapping[str, Any]
    pins: Mapping[str, Any] = field(default_factory=dict)
    plans: tuple[str, ...] = ALL
    slow: bool = False


def ids(tokens: int = 8) -> Tensor:
    """Two samples of token ids."""
    return torch.zeros(2, tokens, dtype=torch.long)


class Tower(nn.Module):
    """Embeddings and residual layers, from which many of the models make a score or a vector."""

    def __init__(self, layers: int = 2, d: int = 16) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, d)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.GELU()) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.emb(ids)
        for block in self.blocks:
            x = x + block(x)
        return x
