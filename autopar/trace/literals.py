"""Calls in forward that torch cannot trace as they stand, replaced by ones that it can.

Tensors made of Python numbers become ops that fill, since a constant on meta has no value; `chunk` of a symbolic size
becomes a split; calls that a trace would leave out without a word are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode

from ..runtime.internals import tree_leaves
from .refusals import InsideError, TransformError
from .source import line_of_the_user


class Literals(TorchFunctionMode):
    """Within: `torch.tensor(numbers)` is a `torch.full` for each number, `x[[2, 3]]` is a slice or reads such a tensor,
    `x.chunk(2)` of a size with that factor is a split, and `x.data` is `x.detach()`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and args and not isinstance(args[0], Tensor):
            data, dtype = args[0], kwargs.get("dtype", args[1] if len(args) > 1 else None)
            if _numbers(data):
                return _filled(data, dtype or _common_dtype(data), kwargs.get("device"))
        if func in _LOST:
            raise InsideError(f"tracing failed at {line_of_the_user()}: {_LOST[func]}", "")
        if torch._C._functorch.peek_interpreter_stack() is not None:  # private: nothing public tells of a transform
            raise TransformError
        if func is Tensor.__getitem__:
            return func(args[0], _index(args[1]))
        if func in (torch.cat, torch.concat, torch.concatenate) and "out" not in kwargs:
            return func(*_without_empty(*args, **kwargs))
        if func in (torch.chunk, Tensor.chunk):
            return _chunks(func, *args, **kwargs)
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        return func(*args, **kwargs)


_HOOK = (
    "a program has no hooks on gradients: write an autograd.Function, which is kept whole, or change the loss so that "
    "its gradient is what you want"
)
_LOST = {  # what a trace would leave out without a word
    Tensor.register_hook: _HOOK,
    Tensor.register_post_accumulate_grad_hook: _HOOK,
    Tensor.data.__set__: "x.data = … changes a tensor behind autograd: compute a new one",  # type: ignore[attr-defined]
}


def _without_empty(tensors: Any, dim: int = 0, **more: Any) -> tuple[Any, int]:
    """The operands of a cat without those of shape [0], which may stand beside tensors of any shape: empty caches."""
    kept = [x for x in tensors if x.dim() != 1 or type(x.shape[0]) is not int or x.shape[0]]
    same = kept and all(x.dtype == kept[0].dtype for x in tensors)
    return (kept if same else tensors), more.get("axis", dim)


def _chunks(chunk: Any, input: Tensor, chunks: int, dim: int = 0) -> Any:
    """Parts of one size where that is certain; torch asks how many there are, which it cannot answer for a symbol."""
    size: Any = input.shape[dim]
    if isinstance(size, torch.SymInt) and chunks > 0 and statically_known_true(size % chunks == 0):
        return input.split([size // chunks] * chunks, dim)
    return chunk(input, chunks, dim)


def _index(index: Any) -> Any:
    """An index without lists of numbers, which would be constants."""
    items = index if isinstance(index, tuple) else (index,)
    lists = [i for i in items if isinstance(i, list) and all(type(n) is int for n in i)]
    if not lists:
        return index
    alone = len(lists) == 1 and not any(isinstance(i, Tensor) for i in items)
    return tuple(_range(i, alone) if any(i is found for found in lists) else i for i in items)


def _range(numbers: list[int], alone: bool) -> slice | Tensor:
    """The slice that reads the same, where one does; for more than one list would be read in pairs."""
    if not numbers:
        return _filled(numbers, torch.int64, None)
    first = numbers[0]
    in_order = numbers == list(range(first, first + len(numbers)))
    if alone and in_order and (first >= 0 or numbers[-1] < 0):
        return slice(first, numbers[-1] + 1 or None)
    return _filled(numbers, torch.int64, None)


def _numbers(data: Any) -> bool:
    """Whether data is a number or nested lists of numbers."""
    if isinstance(data, list | tuple):
        return all(_numbers(item) for item in data)
    return isinstance(data, bool | int | float)


def _common_dtype(data: Any) -> torch.dtype:
    """The dtype that torch.tensor gives these numbers."""
    flat = tree_leaves(data)
    if flat and all(isinstance(number, bool) for number in flat):
        return torch.bool
    if not flat or any(isinstance(number, float) for number in flat):
        return torch.get_default_dtype()
    return torch.int64


def _filled(data: Any, dtype: torch.dtype, device: Any) -> Tensor:
    if not isinstance(data, list | tuple):
        return torch.full((), data, dtype=dtype, device=device)
    if not data:
        return torch.empty(0, dtype=dtype, device=device)
    return torch.stack([_filled(item, dtype, device) for item in data])
