"""A module of one's own: two inputs through one encoder, a dict for its output, and a loss given from outside."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, LAYERS, LENGTH, VOCABULARY = 48, 2, 16, 300


class Mixer(nn.Module):
    """A gated block of an odd width."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.gate, self.up, self.down = nn.Linear(D, 100), nn.Linear(D, 100), nn.Linear(100, D)

    def forward(self, x: Tensor) -> Tensor:  # [b, s, d] -> [b, s, d]
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Siamese(nn.Module):
    """How alike two texts are; `weight` of a text's tokens is optional."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, D)
        self.layers = nn.ModuleList(Mixer() for _ in range(LAYERS))
        self.head = nn.Linear(D, D)
        self.scale = nn.Parameter(torch.ones(()))

    def encode(self, ids: Tensor) -> Tensor:  # [b, s] -> [b, d]
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(dim=1))

    def forward(self, left: Tensor, right: Tensor, weight: Tensor | None = None) -> dict[str, Tensor]:
        a, b = self.encode(left), self.encode(right)
        if weight is not None:
            a = a * weight
        return {"score": self.scale * (a * b).sum(dim=-1) / D, "left": a, "right": b}


def loss(outputs: Mapping[str, Tensor], batch: Mapping[str, Any]) -> Tensor:
    """Squared error of the score, and a little of the size of what the encoder gives."""
    error = F.mse_loss(outputs["score"], batch["alike"])
    return error + 0.01 * (outputs["left"].square().mean() + outputs["right"].square().mean())


class Pairs:
    """Pairs of texts of random tokens; alike is how many of them are the same."""

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        left, other = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
        same = torch.rand(LENGTH, generator=generator) < torch.rand((), generator=generator)
        return {"left": left, "right": torch.where(same, left, other), "alike": same.float().mean()}


def build(seed: int = 0) -> Siamese:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Siamese()


def main() -> None:
    from demo import prove  # type: ignore[import-not-found] # beside this script

    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    inputs = {"left": ids, "right": ids.clone(), "alike": torch.zeros(2)}
    options: dict[str, Any] = {"gpus": 2, "tp": 2, "global_batch": 16, "loss": loss}
    prove(build(), inputs, folder=Path("out/siamese"), data="siamese:Pairs", steps=20, **options)


if __name__ == "__main__":
    main()
