"""Where values come from: weights files, recorded initialisation, and the names of the original model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from .parameters import Value

WEIGHTS = "weights.pt"
RANDOM_OPS = ("normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "random_")
Part = tuple[str, int, int, int]  # (original name, dim, start, length)


@dataclass(frozen=True)
class Names:
    """Between the program's parameters and those of the original model, both ways.

    tied: alias → original. parts: a parameter that is a slice of one of the original model, as the q of a
    fused qkv.
    """

    tied: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, Part] = field(default_factory=dict)

    def original(self, name: str) -> str:
        """The name under which a tied parameter is kept."""
        return self.tied.get(name, name)

    def value(self, values: Value) -> Value:
        """Values by the program's names, from values by the original model's."""

        def read(name: str, shape: torch.Size) -> Tensor:
            name = self.original(name)
            if name not in self.parts:
                return values(name, shape)
            fused, dim, start, length = self.parts[name]
            whole = list(shape)
            whole[dim] = max(s + n for f, _, s, n in self.parts.values() if f == fused)
            return values(fused, torch.Size(whole)).narrow(dim, start, length)

        return read

    def join(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors by the original model's names, from those by the program's."""
        joined = {name: t for name, t in tensors.items() if name not in self.parts}
        for name in sorted((n for n in tensors if n in self.parts), key=lambda n: self.parts[n][2]):
            fused, dim, start, _ = self.parts[name]
            joined[fused] = torch.cat([joined[fused], tensors[name]], dim) if start else tensors[name]
        return joined


def read_weights(weights: Path | Mapping[str, Tensor], program: Path, seed: int) -> Value:
    """Values by the original names: given tensors or a folder with weights.pt, then the program's own folder.

    The program's folder may hold weights.pt (buffers at least), and init.json for what has no weights.
    Raises ValueError where neither has values.
    """
    if isinstance(weights, Path) and weights != program and not (weights / WEIGHTS).exists():
        raise ValueError(f"{weights} holds neither {WEIGHTS} nor a checkpoint of --save")
    tensors = {**read_tensors(program), **(weights if isinstance(weights, Mapping) else read_tensors(weights))}
    recipes = json.loads((program / "init.json").read_text()) if (program / "init.json").exists() else {}

    def value(name: str, shape: torch.Size) -> Tensor:
        if name in tensors:
            return tensors[name]
        if name in recipes and weights == program:
            return draw(recipes[name], shape, seed, name)
        raise ValueError(f"no values for {name!r} in {WEIGHTS}: give --init a folder that has them")

    return value


def draw(recipe: Iterable[list[object]], shape: torch.Size, seed: int, name: str) -> Tensor:
    """A whole tensor by recorded in-place ops, seeded by its name: the same values under every plan.

    ("part", start, stop, op, …) is an op on these elements, counted row by row.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    tensor = torch.empty(shape, dtype=torch.float32)
    for op, *args in recipe:
        part = tensor
        if op == "part":
            start, stop, op, *args = args
            part = tensor.view(-1)[start:stop]
        options = {"generator": generator} if op in RANDOM_OPS else {}
        getattr(part, str(op))(*args, **options)
    return tensor


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of weights.pt, mapped rather than read; none where there is no such file."""
    path = folder / WEIGHTS
    if not path.exists():
        return {}
    tensors: dict[str, Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return tensors
