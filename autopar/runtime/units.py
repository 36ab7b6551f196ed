"""Units of data parallelism: parameters that are gathered together, and whose gradients are reduced together.

Each layer is one, or a group of layers that backward computes again together, and so is what a method of the model
reads outside of layers: embeddings before them, norm and head after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from .parameters import Container


@dataclass(frozen=True)
class Unit:
    """Modules by path; `method` of the model runs them, where they have no forward of their own."""

    modules: Mapping[str, nn.Module]
    method: str = ""

    @property
    def first(self) -> nn.Module:
        return next(iter(self.modules.values()))


def units_of(
    model: nn.Module, layers: Sequence[str], groups: Sequence[Sequence[str]], ends: Mapping[str, Sequence[str]]
) -> list[Unit]:
    """The units of a stage; what they leave is gathered with the model itself.

    `layers`: paths of the ModuleDicts whose members are units. `groups`: paths of members that are one unit together.
    `ends`: the model's methods outside of layers, each with the modules whose parameters it reads.
    """
    inner = list(_layers(model, layers, groups))
    return [*inner, *_ends(model, inner, ends)]


def _layers(model: nn.Module, layers: Sequence[str], groups: Sequence[Sequence[str]]) -> Iterator[Unit]:
    modules = dict(model.named_modules())
    together = {name: tuple(group) for group in groups for name in group}
    done: set[str] = set()
    for path in layers:
        held = modules.get(path, nn.Module())  # a stage may have no layer of a list
        for index, layer in held.named_children():
            name = f"{path}.{index}".lstrip(".")
            if type(layer) is Container or name in done:  # else it holds parameters beside the layers
                continue
            unit = Unit({own: modules[own] for own in together.get(name, (name,))})
            done |= unit.modules.keys()
            yield unit


def _ends(model: nn.Module, layers: Sequence[Unit], ends: Mapping[str, Sequence[str]]) -> Iterator[Unit]:
    """A unit for each method: the modules all of whose parameters it alone reads. What is shared, as a tied embedding
    is, stays with the model, whole from the first to the last that reads it."""
    modules = dict(model.named_modules())
    readers: dict[int, set[str]] = {}
    inside = ((module.parameters(), "a layer") for unit in layers for module in unit.modules.values())
    outside = (
        (modules[p].parameters(recurse=False), name) for name, paths in ends.items() for p in paths if p in modules
    )
    for parameters, reader in (*inside, *outside):
        for p in parameters:
            readers.setdefault(id(p), set()).add(reader)
    for name, paths in ends.items():
        own = [p for p in paths if p in modules and all(readers.get(id(x)) == {name} for x in modules[p].parameters())]
        tops = [path for path in own if not any(path.startswith(f"{other}.") for other in own)]
        if tops:
            yield Unit({path: modules[path] for path in tops}, name)
