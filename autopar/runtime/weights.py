"""The names of the original model, and where values come from: weights files and recorded initialisation."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .parameters import Value
from .pieces import Piece, piece_of

WEIGHTS, RECIPES = "weights.pt", "init.json"
RANDOM_OPS = ("normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "random_")
Part = tuple[str, int, int, int]  # (original name, dim, start, length)
Groups = Sequence[tuple[Sequence[str], Mapping[str, Any]]]  # an optimizer's (parameter names, options)


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

    @cached_property
    def wholes(self) -> Mapping[str, int]:
        """The size of each parameter that has parts, on the dim that they cut."""
        wholes: dict[str, int] = {}
        for fused, _, start, length in self.parts.values():
            wholes[fused] = max(wholes.get(fused, 0), start + length)
        return wholes

    def whole(self, name: str) -> str:
        """The name in the original model: of the parameter itself, or of the one that it is a part of."""
        name = self.original(name)
        return self.parts[name][0] if name in self.parts else name

    def piece(self, name: str, x: Tensor) -> Piece:
        """This rank's block of a parameter, inside the original's tensor."""
        part = self.parts.get(self.original(name))
        if part is None:
            return piece_of(x)
        fused, dim, start, _ = part
        return piece_of(x).inside(dim, start, self.wholes[fused])

    def value(self, values: Value) -> Value:
        """Values by the program's names, from values by the original model's."""

        def read(name: str, shape: torch.Size) -> Tensor:
            name = self.original(name)
            if name not in self.parts:
                return values(name, shape)
            fused, dim, start, length = self.parts[name]
            whole = [*shape[:dim], self.wholes[fused], *shape[dim + 1 :]]
            return values(fused, torch.Size(whole)).narrow(dim, start, length)

        return read

    def join(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors by the original model's names, from those by the program's; a part that is missing is zero."""
        joined: dict[str, Tensor] = {}
        for name, x in tensors.items():
            if name not in self.parts:
                joined[name] = x
                continue
            fused, dim, start, length = self.parts[name]
            whole = [*x.shape[:dim], self.wholes[fused], *x.shape[dim + 1 :]]
            joined.setdefault(fused, x.new_zeros(whole)).narrow(dim, start, length).copy_(x)
        return joined


# --------------------------------------------------------------------------------
# Parameters that several virtual stages of a rank have under one name, as those of a layer object used again. The first
# stage's has the name; the copy of its n-th other stage is called `name@n` on this rank, and is tied to it.


def by_name(models: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of several models, none left out."""
    return {key: p for key, _, p in _keyed(models)}


def copied_names(models: Sequence[nn.Module], tied: Mapping[str, str]) -> dict[str, str]:
    """Copy → the name under which its values are kept; `tied` says so of the original model's names."""
    return {key: tied.get(name, name) for key, name, _ in _keyed(models) if key != name}


def with_copies(groups: Groups, copies: Mapping[str, str]) -> Groups:
    """The optimizer's groups, each copy in that of its original."""
    copied = [[key for key in copies if key.partition("@")[0] in names] for names, _ in groups]
    return [((*names, *more), options) for (names, options), more in zip(groups, copied, strict=True)]


def _keyed(models: Sequence[nn.Module]) -> Iterator[tuple[str, str, nn.Parameter]]:
    seen: set[str] = set()
    for n, model in enumerate(models):
        for name, p in model.named_parameters():
            yield (f"{name}@{n}" if name in seen else name), name, p
            seen.add(name)


# --------------------------------------------------------------------------------
# Where values come from


def read_weights(weights: Path | Mapping[str, Tensor], program: Path, seed: int) -> Value:
    """Values by the original names: given tensors or a folder with weights.pt, then the program's own folder.

    The program's folder may hold weights.pt (buffers at least), and init.json for what has no weights.
    Raises ValueError where neither has values.
    """
    if isinstance(weights, Path) and weights != program and not (weights / WEIGHTS).exists():
        raise ValueError(f"{weights} holds neither {WEIGHTS} nor a checkpoint of --save")
    tensors = {**read_tensors(program), **(weights if isinstance(weights, Mapping) else read_tensors(weights))}
    recipes = _recipes(program / RECIPES)

    def value(name: str, shape: torch.Size) -> Tensor:
        if name in tensors:
            return tensors[name]
        if name in recipes and weights == program:
            return draw(recipes[name], shape, seed, name)
        raise ValueError(f"no values for {name!r} in {WEIGHTS} or {RECIPES}: give --init a folder that has them")

    return value


def _recipes(path: Path) -> dict[str, list[list[object]]]:
    """The recorded initialisation of each parameter without weights; ValueError where the file is damaged."""
    if not path.exists():
        return {}
    try:
        recipes = json.loads(path.read_text())
        if all(type(step) is list and step for steps in recipes.values() for step in steps):
            return recipes  # type: ignore[no-any-return]
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    raise ValueError(f"{path} is damaged: save the program again")


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
        if not re.fullmatch(r"[a-z]+(_[a-z]+)*_", str(op)):
            raise ValueError(f"init.json fills {name!r} by {op!r}, which is no op in place: save the program again")
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
