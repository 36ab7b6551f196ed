"""Positions beyond a model's table, found before the trace: forward runs on meta tensors of the length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from ..errors import PlanError

# What leaves the largest of the positions 0, 1, 2, … as it is.
_SAME = (
    Tensor.unsqueeze, Tensor.expand, Tensor.view, Tensor.reshape, Tensor.to, Tensor.long, Tensor.repeat, Tensor.flatten,
    Tensor.expand_as, Tensor.squeeze, torch.unsqueeze,
)  # fmt: skip
_MOST_RESERVED = 4  # rows that a table begins with, which are no positions: OPT's has two
_ADD = (Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add)


def check_positions(model: nn.Module, inputs: Mapping[str, Any], sequence: int, asked: str) -> None:
    """PlanError where forward looks up a position that its table has not at this length.

    asked: the length in the user's words. Looked at only where some table has fewer rows than the sequence tokens.
    """
    rows_of = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    short = sorted(rows for rows in rows_of if rows < sequence + _MOST_RESERVED)
    if not short:
        return
    lookups = _Lookups(sequence)
    runs = _runs(model, inputs, sequence, lookups)
    found = min(lookups.beyond, default=None)
    if found is None and not runs:  # positions that are a buffer of their own: forward runs up to the table's length
        found = next(((n, n) for n in short if _runs(model, inputs, n) and not _runs(model, inputs, n + 1)), None)
    if found is not None:
        raise PlanError(f"{asked}: the model's table of positions has {found[1]} rows; use at most {found[0]}")


class _Lookups(TorchFunctionMode):
    """Within: which tables are read at positions beyond their rows; `beyond`: how many tokens they serve, and rows."""

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.beyond: list[tuple[int, int]] = []
        self._lasts: dict[int, int] = {}  # by identity, the largest position that a tensor holds
        self._kept: list[Tensor] = []  # so that no identity is used again

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.arange and len(args) in (1, 2) and "step" not in kwargs:
            self._keep(result, args[-1] - 1)
        elif "out" in kwargs or func is Tensor.__setitem__ or (func not in _SAME and any(result is a for a in args)):
            self._lasts.clear()  # in place: what a tensor holds now, it may share with others
        elif args and id(args[0]) in self._lasts:
            self._follow(func, args, kwargs, result)
        return result

    def _follow(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Of an op whose first argument holds positions."""
        last = self._lasts[id(args[0])]
        if func is F.embedding:
            rows = (args[1] if len(args) > 1 else kwargs["weight"]).shape[0]
            self.beyond += [(max(1, self.sequence - (last + 1 - rows)), rows)] if last >= rows else []
        elif func in _SAME or (func is Tensor.__getitem__ and _takes_all(args[1])):
            self._keep(result, last)
        elif func in _ADD and isinstance(args[1], int):
            self._keep(result, last + args[1])

    def _keep(self, result: Any, last: int) -> None:
        self._lasts[id(result)] = last
        self._kept.append(result)


def _takes_all(index: Any) -> bool:
    """Whether an index is None and colons only."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or (isinstance(part, slice) and part == slice(None)) for part in parts)


def _runs(model: nn.Module, inputs: Mapping[str, Any], length: int, mode: TorchFunctionMode | None = None) -> bool:
    """Whether forward runs on meta tensors with sequences of `length`; what else it may want, the trace tells."""
    rows = [v for v in inputs.values() if isinstance(v, Tensor) and v.dim() == 2 and not v.is_floating_point()]
    example = max((v.shape[1] for v in rows), default=0)

    def resized(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = [length if dim == 1 and size == example > 1 else size for dim, size in enumerate(value.shape)]
        return torch.empty(shape, dtype=value.dtype, device="meta")

    hollow = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    try:
        with mode or nullcontext(), torch.no_grad():
            functional_call(model, hollow, (), {name: resized(value) for name, value in inputs.items()})
    except Exception:  # noqa: BLE001 - whatever the user's forward raises: the trace says it with its line
        return False
    return True
