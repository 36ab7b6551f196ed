"""The trees of torch that runtime and tracing rest on."""

import torch

from autopar.runtime.trees import tree_flatten, tree_leaves, tree_unflatten


def test_leaves_come_in_order_and_go_back_into_their_containers() -> None:
    x, y = torch.zeros(2), torch.ones(3)
    data = {"first": (x, [1, None]), "second": y}
    leaves, form = tree_flatten(data)
    assert leaves[0] is x and leaves[1:3] == [1, None] and leaves[3] is y
    assert all(a is b for a, b in zip(tree_leaves(data), leaves, strict=True))
    again = tree_unflatten([y, 2, 3, x], form)
    assert again["first"][0] is y and again["first"][1] == [2, 3] and again["second"] is x
