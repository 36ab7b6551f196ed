"""What an attacker writes: names of modules that would be code, and pickles that run when they are read.

Each does the same harm: a file appears, the canary.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Hostile:
    """An object whose pickle makes a file when it is read."""

    canary: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.canary,)

    def pickled(self) -> bytes:
        return pickle.dumps(self)

    def zipped(self) -> bytes:
        """As torch.save writes it."""
        written = io.BytesIO()
        torch.save(self, written)
        return written.getvalue()


# --------------------------------------------------------------------------------
# A model with names of one's own

SAMPLES, SEQUENCE, WIDTH, VOCABULARY = 4, 4, 8, 256
NAMES = 19


class Named(nn.Module):
    """A module whose children, parameters and buffers have any names, called by their places."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names

    def put(self, place: int, what: nn.Module | nn.Parameter | Tensor) -> None:
        name = self.names[place]
        if isinstance(what, nn.Module):
            self.add_module(name, what)
        elif isinstance(what, nn.Parameter):
            self.register_parameter(name, what)
        else:
            self.register_buffer(name, what)

    def at(self, place: int) -> Any:
        name = self.names[place]
        return self._modules.get(name) or self._parameters.get(name, self._buffers.get(name))


class Layer(Named):
    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.put(0, nn.Linear(WIDTH, 2 * WIDTH))
        box = Named(names[2:4])
        box.put(0, nn.Linear(2 * WIDTH, WIDTH))
        box.put(1, nn.Parameter(torch.randn(WIDTH)))
        self.put(1, box)
        self.put(4, nn.Parameter(torch.randn(WIDTH)))
        self.put(5, torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        box = self.at(1)
        h = box.at(0)(F.gelu(self.at(0)(x))) * box.at(1)
        result: Tensor = x + h * self.at(4) + self.at(5)
        return result


class Model(Named):
    """An embedding, a table, two lists of two layers, and a head; `layers`: the names of both kinds of layer."""

    def __init__(self, names: Sequence[str], layers: Sequence[str]) -> None:
        super().__init__(names)
        first, second = (type(kind, (Layer,), {}) for kind in layers)
        self.put(0, nn.Embedding(VOCABULARY, WIDTH))
        self.put(1, nn.Parameter(torch.randn(WIDTH)))
        self.put(2, torch.randn(WIDTH))
        self.put(3, nn.ModuleList(first(names[7:13]) for _ in range(2)))
        self.put(4, nn.Linear(WIDTH, VOCABULARY))
        box = Named(names[6:7])
        box.put(0, nn.ModuleList(second(names[13:]) for _ in range(2)))
        self.put(5, box)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.at(0)(input_ids) + self.at(1) * self.at(2)
        for layer in (*self.at(3), *self.at(5).at(0)):
            x = layer(x)
        return F.cross_entropy(self.at(4)(x).flatten(0, 1), labels.flatten())


def hostile_model(names: Sequence[str], root: str, *layers: str) -> nn.Module:
    """A model with `NAMES` names of modules, parameters and buffers, and three names of classes."""
    torch.manual_seed(0)
    model: nn.Module = type(root, (Model,), {})(names, layers)
    return model


def inputs() -> Mapping[str, Tensor]:
    ids = torch.randint(VOCABULARY, (SAMPLES, SEQUENCE), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.roll(1, 1)}
