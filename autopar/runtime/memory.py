"""Peak of live tensor storage, for devices whose allocator keeps no count."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .internals import TorchDispatchMode, tree_leaves


class LiveStorage(TorchDispatchMode):
    """Counts the bytes of tensor storages that are alive: `peak` since the last `reset`, and `live()` now.

    A process's resident set will not do: glibc keeps what is freed and even inverts the order of ZeRO stages.
    Slows every op, so only where it is asked for.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._bytes = 0
        self.peak = 0

    def live(self) -> int:
        """Bytes now. Counts again, because fully_shard frees by resizing storages that stay alive."""
        for key, (reference, _) in list(self._storages.items()):
            storage = reference()
            self._storages[key] = (reference, 0 if storage is None else storage.nbytes())
        self._bytes = sum(size for _, size in self._storages.values())
        return self._bytes

    def reset(self) -> None:
        self.peak = self.live()

    def track(self, tensors: Iterable[Any]) -> None:
        for t in tensors:
            if isinstance(t, Tensor) and type(t) in (Tensor, torch.nn.Parameter) and t.device.type != "meta":
                self._add(t.untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> None:
        # `_cdata`, private, is the only identity of a storage: Python's objects for it come and go.
        key, size = storage._cdata, storage.nbytes()
        if key not in self._storages:
            self._storages[key] = (weakref.ref(storage), 0)
            weakref.finalize(storage, self._remove, key)
        reference, known = self._storages[key]
        self._storages[key] = (reference, size)
        self._bytes += size - known
        if self._bytes > self.peak:
            self.peak = max(self.peak, self.live())

    def _remove(self, key: int) -> None:
        self._bytes -= self._storages.pop(key)[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor first: it calls again with the local tensors
        self.track(tree_leaves((args, kwargs)))
        out = func(*args, **(kwargs or {}))
        self.track(tree_leaves(out))
        return out
