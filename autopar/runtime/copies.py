"""Parameters that several virtual stages of a rank have under one name, as those of a layer object used again.

The first stage's has the name; the copy of its n-th other stage is called `name@n` on this rank, and is tied to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

Groups = Sequence[tuple[Sequence[str], Mapping[str, Any]]]


def by_name(models: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of several models, none left out."""
    return {key: p for key, _, p in _keyed(models)}


def copied_names(models: Sequence[nn.Module], tied: Mapping[str, str]) -> dict[str, str]:
    """Copy → the name under which its values are kept; `tied` says so of the original model's names."""
    return {key: tied.get(name, name) for key, name, _ in _keyed(models) if key != name}


def with_copies(groups: Groups, copies: Mapping[str, str]) -> Groups:
    """The optimizer's groups, each copy in that of its original."""
    return [((*names, *(key for key in copies if key.partition("@")[0] in names)), own) for names, own in groups]


def _keyed(models: Sequence[nn.Module]) -> Iterator[tuple[str, str, nn.Parameter]]:
    seen: set[str] = set()
    for n, model in enumerate(models):
        for name, p in model.named_parameters():
            yield (f"{name}@{n}" if name in seen else name), name, p
            seen.add(name)
