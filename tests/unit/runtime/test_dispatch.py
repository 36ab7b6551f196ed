"""The mode that counting memory and recording initialisations rest on."""

from __future__ import annotations

from typing import Any

import torch

from autopar.runtime.dispatch import TorchDispatchMode


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_each_op_is_seen_as_it_runs_forward_and_backward_and_nothing_after() -> None:
    x = torch.ones(3, requires_grad=True)
    with Names() as mode:
        y = x.exp()
        assert mode.seen[0] == "aten::exp" and "aten::mul" not in mode.seen
        y.sum().backward()
    assert {"aten::sum", "aten::mul"} <= set(mode.seen)
    count = len(mode.seen)
    x.exp()
    assert len(mode.seen) == count
