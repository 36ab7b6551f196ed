"""The order of gathers: while one unit computes, the next one's parameters are on their way, forward and backward.

fully_shard by itself issues a gather when its unit is reached: early only as far as the host runs ahead of the device,
and in a pipeline its backward would go on from one micro-batch to another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .trees import tree_leaves


class Prefetch:
    """Notes the order in which the first forward uses the units, and has each gather the next one (depth 1).

    A unit that is used several times with different ones after it gathers none for them.
    """

    def __init__(self, root: nn.Module, units: Sequence[nn.Module]) -> None:
        self._used: list[tuple[nn.Module, bool]] = []
        self._hooks = [unit.register_forward_hook(self._note) for unit in units]
        self._hooks.append(root.register_forward_hook(self._set))

    def note(self, unit: nn.Module, output: Any) -> None:
        """`unit` has computed `output`; a unit without a graph is not part of the backward."""
        graded = any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(output))
        if self._hooks:
            self._used.append((unit, graded))

    def _note(self, unit: nn.Module, inputs: Any, output: Any) -> None:
        self.note(unit, output)

    def _set(self, root: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            self._used.clear()
            return
        for unit, following in _followers([root, *(unit for unit, _ in self._used)]):
            unit.set_modules_to_forward_prefetch([following] if following else [])
        for unit, following in _followers([root, *(unit for unit, graded in reversed(self._used) if graded)]):
            # With none set, torch goes on to the last unit of another micro-batch, or to one without a backward.
            unit.set_modules_to_backward_prefetch([following or unit])
        while self._hooks:
            self._hooks.pop().remove()


def _followers(order: Sequence[nn.Module]) -> Iterator[tuple[FSDPModule, FSDPModule | None]]:
    """Each unit with the one that always follows it; None where that is not always the same one."""
    after: dict[nn.Module, set[nn.Module | None]] = {}
    for unit, following in zip_longest(order, order[1:]):
        after.setdefault(unit, set()).add(following)
    for unit, all_following in after.items():
        following = all_following.pop() if len(all_following) == 1 else None
        assert isinstance(unit, FSDPModule) and isinstance(following, FSDPModule | None)
        yield unit, following
