"""Declaring parameters by their original names and global shapes, and giving them values.

Parameters are declared on the meta device: as DTensors over the tp axis where it has more than one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .mesh import current
from .precision import compute_dtype, storage_dtype

Shape = tuple[int, ...]
Value = Callable[[str, torch.Size], Tensor]  # name, global shape → the whole tensor, on the CPU


def chunk_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of one shard of a dim: DTensor's rule, ceil(size / parts) each, the last ones short."""
    chunk = -(-size // parts)
    return min(index * chunk, size), min((index + 1) * chunk, size)


def parameter(module: nn.Module, name: str, shape: Shape, shard: int | None = None, frozen: bool = False) -> None:
    """Declare a parameter of global `shape`, sharded over tp on dim `shard` or replicated; `frozen`: not trained.

    Dots in `name` make plain containers. In half precision the stored parameter is the fp32 master.
    """
    mesh = current()
    value = torch.empty(shape, dtype=storage_dtype(mesh.settings), device="meta")
    if mesh.size("tp") > 1:
        value = _distribute(value, Replicate() if shard is None else Shard(shard))
    owner, leaf = owner_of(module, name)
    owner.register_parameter(leaf, nn.Parameter(value, not frozen))


def buffer(module: nn.Module, name: str, shape: Shape, dtype: torch.dtype, persistent: bool = False) -> None:
    """Declare a buffer, whole on every rank and in its own dtype whatever the precision; saved if `persistent`."""
    owner, leaf = owner_of(module, name)
    owner.register_buffer(leaf, torch.empty(shape, dtype=dtype, device="meta"), persistent=persistent)


def tie(module: nn.Module, name: str, other: str, shape: Shape, shard: int | None = None, frozen: bool = False) -> None:
    """Make `name` the same parameter as `other`, declared before where this stage has it, else a copy kept equal."""
    tied = dict(module.named_parameters(remove_duplicate=False)).get(other)
    if tied is None:
        return parameter(module, name, shape, shard, frozen)
    owner, leaf = owner_of(module, name)
    owner.register_parameter(leaf, tied)


def local(p: Tensor) -> Tensor:
    """This rank's part of a parameter, in the compute dtype; its gradient lies as the parameter does."""
    return _computed(p.to_local() if isinstance(p, DTensor) else p)


def summed(p: Tensor) -> Tensor:
    """This rank's part of a replicated parameter used in sharded work: its gradient is summed over tp."""
    return _computed(p.to_local(grad_placements=[Partial()]) if isinstance(p, DTensor) else p)


def _computed(p: Tensor) -> Tensor:
    """A parameter without a dim is kept out of fully_shard, which casts the others."""
    return p if p.dim() else p.to(compute_dtype(current().settings))


def materialise(module: nn.Module, prefix: str, value: Value) -> None:
    """Replace what is still on the meta device in `module` by values, tensors shared under two names once.

    `value(name, shape)` is the whole tensor of a name; `prefix` is the path of `module` in the model.
    """
    filled_by_id: dict[int, nn.Parameter] = {}
    for path, owner in module.named_modules(prefix=prefix.rstrip(".")):
        dot = f"{path}." if path else ""
        for leaf, p in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if p.device.type == "meta":
                if id(p) not in filled_by_id:
                    filled = _filled(p, value(dot + leaf, p.shape), dot + leaf)
                    filled_by_id[id(p)] = nn.Parameter(filled, p.requires_grad)
                owner.register_parameter(leaf, filled_by_id[id(p)])
        for leaf, b in list(owner.named_buffers(recurse=False)):
            if b.device.type == "meta":
                filled = value(dot + leaf, b.shape).to(device=current().device, dtype=b.dtype, copy=True)
                setattr(owner, leaf, filled)  # it stays persistent or not


def unused(rows: Sequence[tuple[Any, ...]], value: Value) -> nn.Module:
    """Parameters and buffers that the loss never reads: the first stage keeps them, to be saved."""
    kept = nn.Module()
    for name, shape, *dtype in rows if current().rank("pp") == 0 else ():
        if dtype:
            buffer(kept, name, shape, dtype[0], persistent=True)
        else:
            parameter(kept, name, shape, frozen=True)
    materialise(kept, "", value)
    return kept


def _filled(p: Tensor, value: Tensor, name: str) -> Tensor:
    """The whole `value` laid out as the meta parameter `p`."""
    if tuple(value.shape) != tuple(p.shape):
        raise ValueError(f"{name} has shape {list(p.shape)}, and its values {list(value.shape)}")
    if isinstance(p, DTensor):
        return _distribute(value, p.placements[0], p.dtype)
    return value.detach().to(device=current().device, dtype=p.dtype, copy=True)


def _distribute(value: Tensor, placement: Placement, dtype: torch.dtype | None = None) -> DTensor:
    """A DTensor over tp; each rank takes its part of a whole tensor that it has: no communication."""
    mesh = current()
    part = value.detach()
    if isinstance(placement, Shard):
        start, stop = chunk_range(value.shape[placement.dim], mesh.size("tp"), mesh.rank("tp"))
        part = part.narrow(placement.dim, start, stop - start)
    device = part.device if part.is_meta else mesh.device
    part = part.to(device=device, dtype=dtype, memory_format=torch.contiguous_format, copy=True)
    stride = torch.empty(value.shape, device="meta").stride()
    tp = mesh.axes["tp"]
    return DTensor.from_local(part, tp, [placement], run_check=False, shape=value.shape, stride=stride)


class Container(nn.Module):
    """A module on the path of a parameter or layer, nothing else; `self.layers[3]` is what it has under "3"."""

    def __getitem__(self, index: int) -> Any:
        return getattr(self, str(index))


def layers_of(model: nn.Module, paths: Sequence[str]) -> dict[str, nn.Module]:
    """The layers of this stage by path, of the lists at `paths`; a Container in a list holds parameters beside them."""
    modules = dict(model.named_modules())
    lists = [(path, modules[path]) for path in paths if path in modules]  # a stage may have no layer of a list
    members = {f"{path}.{index}".lstrip("."): m for path, layers in lists for index, m in layers.named_children()}
    return {path: member for path, member in members.items() if type(member) is not Container}


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The container of a dotted name, made where it is missing, and the last part of the name."""
    *path, leaf = name.split(".")
    for part in path:
        if not hasattr(module, part):
            module.add_module(part, Container())
        module = module.get_submodule(part)
    return module, leaf


def submodule(module: nn.Module, path: str, child: nn.Module) -> None:
    """Put `child` at a dotted path, unless it is there already (a layer object that the model uses twice)."""
    owner, leaf = owner_of(module, path)
    if not hasattr(owner, leaf):
        owner.add_module(leaf, child)


def update_statistics(model: nn.Module) -> None:
    """After a step: running statistics take the values of its forward, and its batch is counted."""
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] == "num_batches_tracked":
            buffer += 1
        elif (following := getattr(buffer, "following", None)) is not None:
            buffer.copy_(following)
            del buffer.following  # type: ignore[attr-defined]


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers, which are saved, by name."""
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}
