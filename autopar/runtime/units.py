"""Units of fully_shard: parameters that are gathered together, and whose gradients are reduced together.

Each layer is one, or a group of layers that backward computes again together, and so is what a method of the model
reads outside of layers: embeddings before them, norm and head after them. While one unit computes, the next one's
parameters are on their way, forward and backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .internals import tree_leaves
from .parameters import layers_of


@dataclass(frozen=True)
class FsdpUnit:
    """Modules by path; `method` of the model runs them, where they have no forward of their own."""

    modules: Mapping[str, nn.Module]
    method: str = ""

    @property
    def first(self) -> nn.Module:
        return next(iter(self.modules.values()))


def units_of(
    model: nn.Module, layers: Sequence[str], groups: Sequence[Sequence[str]], ends: Mapping[str, Sequence[str]]
) -> list[FsdpUnit]:
    """The units of a stage; what they leave is gathered with the model itself.

    `layers`: paths of the ModuleDicts whose members are units. `groups`: paths of members that are one unit together.
    `ends`: the model's methods outside of layers, each with the modules whose parameters it reads.
    """
    inner = list(_layers(model, layers, groups))
    return [*inner, *_ends(model, inner, ends)]


def _layers(model: nn.Module, layers: Sequence[str], groups: Sequence[Sequence[str]]) -> Iterator[FsdpUnit]:
    modules = dict(model.named_modules())
    together = {name: tuple(group) for group in groups for name in group}
    done: set[str] = set()
    for name in layers_of(model, layers):
        if name not in done:
            unit = FsdpUnit({member: modules[member] for member in together.get(name, (name,))})
            done |= unit.modules.keys()
            yield unit


def _ends(model: nn.Module, layers: Sequence[FsdpUnit], ends: Mapping[str, Sequence[str]]) -> Iterator[FsdpUnit]:
    """A unit for each method: the modules all of whose parameters it alone reads. What is shared, as a tied embedding
    is, stays with the model, whole from the first to the last that reads it."""
    modules = dict(model.named_modules())
    present = {name: [path for path in paths if path in modules] for name, paths in ends.items()}
    readers = _readers(modules, layers, present)
    for name, paths in present.items():
        alone = [path for path in paths if all(readers[p] == {name} for p in modules[path].parameters())]
        if tops := [path for path in alone if not any(path.startswith(f"{other}.") for other in alone)]:
            yield FsdpUnit({path: modules[path] for path in tops}, name)


def _readers(
    modules: Mapping[str, nn.Module], layers: Sequence[FsdpUnit], ends: Mapping[str, Sequence[str]]
) -> Mapping[nn.Parameter, set[str]]:
    """The methods of `ends` that read each parameter, and "a layer"."""
    readers: dict[nn.Parameter, set[str]] = defaultdict(set)
    inside = [("a layer", module.parameters()) for unit in layers for module in unit.modules.values()]
    outside = [(name, modules[path].parameters(recurse=False)) for name, paths in ends.items() for path in paths]
    for reader, parameters in (*inside, *outside):
        for p in parameters:
            readers[p].add(reader)
    return readers


# --------------------------------------------------------------------------------
# The order of gathers. fully_shard by itself issues one when its unit is reached: early only as far as the host runs
# ahead of the device, and in a pipeline its backward would go on from one micro-batch to another.


class Prefetch:
    """Notes the order in which the first forward uses the units, and has each gather the next one (depth 1).

    A unit that is used several times with different ones after it gathers none for them.
    """

    def __init__(self, root: nn.Module, units: Sequence[nn.Module]) -> None:
        self._used: list[tuple[nn.Module, bool]] = []
        self._hooks = [unit.register_forward_hook(self._note) for unit in units]
        self._hooks.append(root.register_forward_hook(self._set))

    def note(self, unit: nn.Module, output: Any) -> None:
        """`unit` has computed `output`; a unit without a graph is not part of the backward."""
        graded = any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(output))
        if self._hooks:
            self._used.append((unit, graded))

    def _note(self, unit: nn.Module, inputs: Any, output: Any) -> None:
        self.note(unit, output)

    def _set(self, root: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            self._used.clear()
            return
        for unit, following in _followers([root, *(unit for unit, _ in self._used)]):
            unit.set_modules_to_forward_prefetch([following] if following else [])
        for unit, following in _followers([root, *(unit for unit, graded in reversed(self._used) if graded)]):
            # With none set, torch goes on to the last unit of another micro-batch, or to one without a backward.
            unit.set_modules_to_backward_prefetch([following or unit])
        while self._hooks:
            self._hooks.pop().remove()


def _followers(order: Sequence[nn.Module]) -> Iterator[tuple[FSDPModule, FSDPModule | None]]:
    """Each unit with the one that always follows it; None where that is not always the same one."""
    after: dict[nn.Module, set[nn.Module | None]] = {}
    for unit, following in zip_longest(order, order[1:]):
        after.setdefault(unit, set()).add(following)
    for unit, all_following in after.items():
        following = all_following.pop() if len(all_following) == 1 else None
        assert isinstance(unit, FSDPModule) and isinstance(following, FSDPModule | None)
        yield unit, following
