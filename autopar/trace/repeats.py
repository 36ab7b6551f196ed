"""Deep models are traced in the time of three layers: the others of a list are stood in for by one op each.

Of a list of equal layers, the first, second and last are traced as they are. Each layer between is replaced by
the op `autopar::repeat`, which keeps its place, what it is given, and the shape of its result. `split_layers`
then makes it a call of the second layer's block. That is right where the three traced layers are one class and each
stand-in is given what the second layer reads; anything else raises NotRepeatedError,
and the model is traced whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

_FEWEST = 6  # shorter lists are traced whole
_INDEX_NAMES = ("idx", "index", "layer_id", "layer_number")


class NotRepeatedError(Exception):
    """The layers of a list are not repetitions of one: trace all of them."""


@torch.library.custom_op("autopar::repeat", mutates_args=())
def repeat(hidden: Tensor, others: list[Tensor], index: int) -> Tensor:
    """Stands for a layer: never run, only traced."""
    return hidden.clone()


@repeat.register_fake
def _(hidden: Tensor, others: list[Tensor], index: int) -> Tensor:
    return torch.empty_like(hidden)


def is_stand_in(node: fx.Node) -> bool:
    return node.target is torch.ops.autopar.repeat.default


def fold(model: nn.Module) -> bool:
    """Replace the inner layers of the model's lists of equal layers, in place; whether there were any."""
    folded = False
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList) and len(module) >= _FEWEST and _all_equal(list(module)):
            shape = _Result()
            module[1].register_forward_hook(shape.record)
            for i in range(2, len(module) - 1):
                module[i] = _StandIn(module[i], i, shape)
            folded = True
    return folded


class _Result:
    """Whether the second layer returns its result bare or in a tuple."""

    def __init__(self) -> None:
        self.in_tuple = False

    def record(self, module: nn.Module, args: Any, result: Any) -> None:
        tensors = [r for r in (result if isinstance(result, tuple) else (result,)) if r is not None]
        if len(tensors) != 1 or not args or not isinstance(args[0], Tensor) or tensors[0].shape != args[0].shape:
            raise NotRepeatedError("a layer does not map one hidden state to one of the same shape")
        if tensors[0].dtype != args[0].dtype:
            raise NotRepeatedError("a layer changes the dtype of the hidden state")
        self.in_tuple = isinstance(result, tuple)


class _StandIn(nn.Module):
    """Takes a layer's place; attributes that the model reads of its layers are still there."""

    def __init__(self, layer: nn.Module, index: int, shape: _Result) -> None:
        super().__init__()
        self._index, self._shape = index, shape
        for name, value in vars(layer).items():
            if not name.startswith("_") and not isinstance(value, Tensor | nn.Module):
                setattr(self, name, value)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = torch.utils._pytree.tree_leaves((args, kwargs))  # the public name is for dicts and lists alone
        others = [value for value in given if isinstance(value, Tensor)]
        result = torch.ops.autopar.repeat(hidden, others, self._index)
        return (result,) if self._shape.in_tuple else result


def _all_equal(layers: list[nn.Module]) -> bool:
    """The same modules, shapes and options, but for an index; no parameter in two layers."""
    first = _structure(layers[1])
    owners = [id(p) for layer in layers for p in layer.parameters()]
    return len(owners) == len(set(owners)) and all(_structure(layer) == first for layer in layers[2:])


def _structure(layer: nn.Module) -> list[Any]:
    found: list[Any] = []
    for path, module in layer.named_modules():
        found.append((path, type(module)))
        for name, p in module.named_parameters(recurse=False):
            found.append((name, p.shape, p.dtype, p.requires_grad))
        for name, b in module.named_buffers(recurse=False):
            found.append((name, b.shape, b.dtype))
        for name, value in sorted(vars(module).items()):
            plain = isinstance(value, int | float | bool | str | type(None) | tuple)
            if plain and not name.startswith("_") and not any(word in name for word in _INDEX_NAMES):
                found.append((name, value))
    return found
