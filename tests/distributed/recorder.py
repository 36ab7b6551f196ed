"""What a rank issues, as it is issued: collectives by group; gathers, reductions and computing of units in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from autopar.runtime.internals import TorchDispatchMode, tree_leaves

COLLECTIVES = {
    "allgather": "gather",
    "_allgather_base_": "gather",
    "_all_gather_single": "gather",
    "_reduce_scatter_base_": "scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
}


class DataCollectives(TorchDispatchMode):
    """Counts the collectives on one process group, and the bytes that this rank sends to each other."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = group.group_name
        self.counts: Counter[str] = Counter()
        self.sent_to: Counter[int] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        namespace, _, op = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional") and self._on_group(args):
            self.counts[COLLECTIVES.get(op, op)] += 1
            if op == "send":
                self.sent_to[args[2]] += sum(x.nbytes for x in args[0])
        return func(*args, **(kwargs or {}))

    @property
    def sent_bytes(self) -> int:
        return self.sent_to.total()

    def _on_group(self, args: tuple[Any, ...]) -> bool:
        scripted = (a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
        return any(ProcessGroup.unbox(a).group_name == self._name for a in scripted) or self._name in [
            a for a in args if isinstance(a, str)
        ]


def sharded_groups(model: nn.Module) -> list[FSDPParamGroup]:
    """What fully_shard gathers together, in the order of the modules; several modules may be one group."""
    states = dict.fromkeys(m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule))
    return [group for state in states for group in state._fsdp_param_groups]


@dataclass(frozen=True)
class Event:
    """what: "gather" or "reduce" of a unit; "forward" or "backward": an op that reads parameters of it.

    held: the units that are whole, or on their way, as this begins.
    """

    what: str
    unit: str
    held: frozenset[str]


class IssueOrder(TorchDispatchMode):
    """`events` of the units of a model, named by their first parameter, while this mode is on."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self._groups = {str(group.fsdp_params[0]._param_fqn): group for group in sharded_groups(model)}
        for function, what in (("foreach_all_gather", "gather"), ("foreach_reduce", "reduce")):
            monkeypatch.setattr(_fsdp_param_group, function, self._noted(getattr(_fsdp_param_group, function), what))

    def _noted(self, function: Any, what: str) -> Any:
        def noted(params: Any, *args: Any, **kwargs: Any) -> Any:
            unit = next(name for name, group in self._groups.items() if params[0] in group.fsdp_params)
            self._add(what, unit)
            return function(params, *args, **kwargs)

        return noted

    def _add(self, what: str, unit: str) -> None:
        held = (name for name, g in self._groups.items() if g.is_unsharded or g._all_gather_result is not None)
        self.events.append(Event(what, unit, frozenset(held)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        read = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if type(x) in (torch.Tensor, nn.Parameter)}
        inside_backward = torch._C._current_graph_task_id() != -1
        if func.namespace == "aten" and not func.is_view:
            for name, group in self._groups.items():
                if group.is_unsharded and any(_storage(p) in read for p in group.fsdp_params):
                    self._add("backward" if inside_backward else "forward", name)
        return func(*args, **(kwargs or {}))


def _storage(p: Any) -> int:
    return int(p.all_gather_outputs[0].untyped_storage().data_ptr())
