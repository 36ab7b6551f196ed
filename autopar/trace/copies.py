"""Copies of a user's model, which may have run before."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Module = TypeVar("Module", bound=nn.Module)


class _Detached(TorchFunctionMode):
    """Within: tensors with a graph behind them, which torch does not copy, are copied without it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().__deepcopy__(*args[1:])
        return func(*args, **(kwargs or {}))


def copied(model: Module, memo: Mapping[int, Any] | None = None) -> Module:
    """A deep copy of a model; memo: by id, what takes the place of its tensors, as in `copy.deepcopy`.

    What forward has left in its modules (a cache, a state, the last attention map) is copied as plain values.
    """
    with _Detached():
        return copy.deepcopy(model, dict(memo or {}))
