"""Which layer a forward is in, while a model is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


@contextmanager
def layers_watched(kind: type[nn.Module], tell: Callable[[int, int], None]) -> Iterator[None]:
    """Within: `tell(3, 12)` as any model of class `kind` enters the third of its twelve layers.

    A trace runs copies of the user's model, so that it is known by its class and not by itself.
    """
    numbers: dict[int, int] = {}  # by identity, for a module may not be hashable

    def enter(module: nn.Module, arguments: Any) -> None:
        if type(module) is kind and id(module) not in numbers:
            numbers.clear()
            numbers.update({id(layer): number for number, layer in enumerate(_layers(module), 1)})
        elif id(module) in numbers:
            tell(numbers[id(module)], len(numbers))

    hook = register_module_forward_pre_hook(enter)
    try:
        yield
    finally:
        hook.remove()


def _layers(module: nn.Module) -> list[nn.Module]:
    """The items of its outermost lists."""
    layers: list[nn.Module] = []
    for child in module.children():
        layers += list(child) if isinstance(child, nn.ModuleList | nn.Sequential) else _layers(child)
    return layers
