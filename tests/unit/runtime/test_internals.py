"""What is taken from private modules of torch: the mode that sees each op, and trees of tensors."""

from __future__ import annotations

from typing import Any

import torch

from autopar.runtime.internals import TorchDispatchMode, tree_flatten, tree_leaves, tree_unflatten


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


def test_leaves_come_in_order_and_go_back_into_their_containers() -> None:
    x, y = torch.zeros(2), torch.ones(3)
    data = {"first": (x, [1, None]), "second": y}
    leaves, form = tree_flatten(data)
    assert leaves[0] is x and leaves[1:3] == [1, None] and leaves[3] is y
    assert all(a is b for a, b in zip(tree_leaves(data), leaves, strict=True))
    again = tree_unflatten([y, 2, 3, x], form)
    assert again["first"][0] is y and again["first"][1] == [2, 3] and again["second"] is x
