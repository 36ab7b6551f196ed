"""Which module lists of a model hold its layers, told by the names and shapes of parameters.

Layers are the items of the outermost lists, where at least two items of a list are alike. A list whose items are
stages (their shapes differ, and each holds a list of blocks) is descended into: `stages.1.layers.2` is a layer.
A list inside a layer is no list of layers: `block.0.layer.1` of T5, `layers.3.experts.5`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

_Item = dict[str, Any]  # parameter name relative to the item → shape


class LayerLists:
    """The lists of layers of a model: `paths` are patterns, in which `*` stands for the index of a stage."""

    def __init__(self, paths: frozenset[str]) -> None:
        self.paths = paths

    def layer(self, module: str) -> str | None:
        """The path of the layer that a module is in: "model.layers.3.mlp" → "model.layers.3"."""
        parts = module.split(".")
        for i, part in enumerate(parts):
            if part.isdigit() and _pattern(parts[:i]) in self.paths:
                return ".".join(parts[: i + 1])
        return None


def layer_lists(shapes: Mapping[str, Any]) -> LayerLists:
    """Of a model whose parameters have these shapes (anything that compares equal)."""
    lists: dict[str, dict[str, _Item]] = defaultdict(dict)
    for name, shape in shapes.items():
        prefix, index, rest = _outermost(name)
        if index is not None:
            lists[prefix].setdefault(index, {})[rest] = shape
    chosen: set[str] = set()
    for prefix, items in lists.items():
        chosen |= {_join(prefix, path) for path in _layers_of(list(items.values()))}
    return LayerLists(frozenset(chosen or lists))


def _layers_of(items: list[_Item]) -> set[str]:
    """Paths of the lists of layers at or below a list of these items: "" for the list itself."""
    if len(items) < 2:
        return set()
    if not _some(_nearly_equal, items):
        inner = [_inner_lists(item) for item in items]
        shared = set.intersection(*(set(lists) for lists in inner))
        repeated = {path for path in shared if any(_some(_alike, lists[path]) for lists in inner)}
        if repeated:
            return {f"*.{path}" for path in repeated}
    return {""} if _some(_alike, items) else set()


def _inner_lists(item: _Item) -> dict[str, list[_Item]]:
    found: dict[str, dict[str, _Item]] = defaultdict(dict)
    for name, shape in item.items():
        prefix, index, rest = _outermost(name)
        if index is not None:
            found[prefix].setdefault(index, {})[rest] = shape
    return {prefix: list(items.values()) for prefix, items in found.items()}


def _some(related: Callable[[_Item, _Item], bool], items: list[_Item]) -> bool:
    """Whether any two items are so related."""
    return any(related(a, b) for i, a in enumerate(items) for b in items[:i])


def _nearly_equal(a: _Item, b: _Item) -> bool:
    """Most parameters of the two have the same names and shapes: a first layer may have a bias table more."""
    return 2 * len(a.items() & b.items()) >= len(a.items() | b.items())


def _alike(a: _Item, b: _Item) -> bool:
    """Equal, or modules of several parts most of whose parameters have the same names."""
    compound = any("." in name for name in (*a, *b))
    return a == b or (compound and 2 * len(a.keys() & b.keys()) >= len(a.keys() | b.keys()))


def layer_path(module: str) -> str | None:
    """The item of the outermost list that a module is in, whatever the list holds."""
    match = re.match(r"^((?:[^.\d][^.]*\.)*\d+)(?:\.|$)", module)
    return match[1] if match else None


def _outermost(name: str) -> tuple[str, str | None, str]:
    """ "h.3.mlp.weight" → ("h", "3", "mlp.weight"): the outermost list, the index in it, the rest."""
    match = re.fullmatch(r"(?:(.*?)\.)?(\d+)\.(.+)", name, re.DOTALL)
    return (match[1] or "", match[2], match[3]) if match else (name, None, "")


def _pattern(parts: list[str]) -> str:
    return ".".join("*" if part.isdigit() else part for part in parts)


def _join(prefix: str, path: str) -> str:
    return ".".join(filter(None, (prefix, path)))
