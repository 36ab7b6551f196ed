"""Ids beyond the rows of their table and targets beyond the classes, noticed without waiting for the device.

Where ranks share a table, such an id is in no rank's part and would read as zeros, though the model itself raises. To
ask the device at once would be to wait for it: it keeps a flag, which the trainer reads together with the loss.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_noticed: Tensor | None = None  # of this step; module state, as the current mesh is


def notice_ids(ids: Tensor, rows: int) -> None:
    """Raise the flag where an id is not in [0, rows)."""
    _notice((ids < 0) | (ids >= rows))


def notice_targets(target: Tensor, classes: int, ignore_index: int) -> None:
    """Raise the flag where a target is neither in [0, classes) nor ignored."""
    _notice(((target < 0) | (target >= classes)) & (target != ignore_index))


def _notice(outside: Tensor) -> None:
    global _noticed
    flag = outside.any()
    _noticed = flag if _noticed is None else _noticed | flag


def take_noticed(like: Tensor) -> Tensor:
    """1 where the flag has been raised since the last call, else 0: a number like the given one, on its device."""
    global _noticed
    flag, _noticed = _noticed, None
    return torch.zeros_like(like) if flag is None else flag.to(like)


def outside_error(step: int, batch: Mapping[str, Tensor]) -> IndexError:
    """The error that ends a run before such a step changes a weight. batch: this rank's; another may have the id."""
    ranges = [
        f"{name} {int(x.min())} to {int(x.max())}"
        for name, x in batch.items()
        if not x.is_floating_point() and x.dtype is not torch.bool and x.numel()
    ]
    here = f" In this rank's samples: {', '.join(ranges)}." if ranges else ""
    return IndexError(
        f"step {step}: an id is outside the rows of its table, or a target outside the classes and not ignore_index, "
        f"in the samples of this rank or another.{here} Mend the data, or enlarge the table"
    )
