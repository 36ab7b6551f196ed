"""The device mesh: which rank is which stage, replica and shard.

The current mesh is module state, as torch.distributed's default group is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .settings import Settings

T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """The ranks of this program by axis: "pp", "dp", "cp", "tp", and "data" = dp × cp.

    `root` has the dims (pp, replicate, shard, tp): parameters are sharded over `shard` and copied over
    `replicate`, which together are the data axis.
    """

    settings: Settings
    device: torch.device
    root: DeviceMesh
    axes: Mapping[str, DeviceMesh]

    def size(self, axis: str) -> int:
        return self.axes[axis].size()

    def rank(self, axis: str) -> int:
        return self.axes[axis].get_local_rank()

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.axes[axis].get_group()

    @property
    def stages(self) -> range:
        """The pipeline stages of this rank: one, or several virtual ones."""
        return range(self.rank("pp"), len(self.settings.stages), self.size("pp"))


_current: Mesh | None = None


def current() -> Mesh:
    """The mesh of this process."""
    assert _current is not None, "init_mesh(settings) comes first"
    return _current


def init_mesh(settings: Settings, device: torch.device | str | None = None) -> Mesh:
    """Join the process group, where this has not been done, and lay the ranks out by axis.

    Raises ValueError where the number of processes is not the plan's.
    """
    global _current
    _check_world_size(settings)
    device = _device(device)
    if not dist.is_initialized():
        _current = None
        alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", **alone)
    if _current is not None and _layout(_current.settings) == _layout(settings) and _current.device == device:
        _current = replace(_current, settings=settings)
    else:
        _current = _build(settings, device)
    return _current


def _layout(settings: Settings) -> tuple[int, ...]:
    shards = settings.dp * settings.cp // settings.replicas
    return settings.pp, settings.replicas, shards, settings.tp, settings.dp, settings.cp


def _build(settings: Settings, device: torch.device) -> Mesh:
    pp, replicate, shard, tp, dp, cp = _layout(settings)

    def meshed(**dims: int) -> DeviceMesh:
        return init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))

    root = meshed(pp=pp, replicate=replicate, shard=shard, tp=tp)
    data, one = (root["replicate"], root["shard"]) if replicate > 1 else (root["shard"], root["replicate"])
    axes = {"pp": root["pp"], "data": data, "dp": data, "cp": one, "tp": root["tp"]}
    grouped = one.size() > 1  # groups of hsdp: no dim of `root` is the data axis
    if cp > 1 or grouped:
        split = meshed(pp=pp, dp=dp, cp=cp, tp=tp)
        axes |= {"dp": split["dp"], "cp": split["cp"]}
    if grouped:
        axes["data"] = split["dp"] if cp == 1 else meshed(pp=pp, data=dp * cp, tp=tp)["data"]
    return Mesh(settings, device, root, axes)


def from_each_rank(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The value, any object, that each rank of a group gives, in their order. Every rank of it (None: of all) calls."""
    values = [value] * dist.get_world_size(group)
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def _device(device: torch.device | str | None) -> torch.device:
    if device is None and torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    device = torch.device(device or "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _check_world_size(settings: Settings) -> None:
    launched = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if launched != settings.world_size:
        raise ValueError(
            f"this program was planned for {settings.world_size} processes (pp={settings.pp} × "
            f"dp={settings.dp} × cp={settings.cp} × tp={settings.tp}) and was launched with {launched}: "
            f"run `torchrun --nproc-per-node {settings.world_size} train.py` "
            "(nodes × processes per node on several nodes), or plan for another number of GPUs"
        )
