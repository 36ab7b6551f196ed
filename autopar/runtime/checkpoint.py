"""Saving and resuming with torch.distributed.checkpoint, under any plan.

Keys: `model.<original name>` (tied parameters once), `optimizer.<parameter name>.<state>`, `step`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as read_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as write_checkpoint
from torch.distributed.tensor import DTensor

from .optimizer import Optimizer
from .weights import Names

Parameters = Mapping[str, nn.Parameter]


def is_checkpoint(folder: Path) -> bool:
    return (folder / ".metadata").exists()


def full(x: Tensor) -> Tensor:
    """The whole of a sharded tensor, on every rank that holds a part; all of them must call."""
    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x


def save(folder: Path, parameters: Parameters, optimizer: Optimizer, names: Names, step: int) -> None:
    """Every rank calls; each writes its own parts."""
    model = {names.original(n): p.detach() for n, p in parameters.items() if n not in names.parts}
    for fused, parts in names.fused(parameters).items():
        model |= names.join({n: full(parameters[n]) for n in parts})
        assert fused in model
    states = {
        f"{names.original(n)}.{key}": value for n in parameters for key, value in optimizer.states(n).items()
    }
    write_checkpoint({"model": model, "optimizer": states, "step": torch.tensor(step)}, checkpoint_id=folder)


def load(folder: Path, parameters: Parameters, optimizer: Optimizer, names: Names) -> int:
    """Fill parameters and optimizer state in place from a checkpoint of any plan; returns its step.

    Every rank calls; each reads its own parts. Optimizer state that is not there starts anew.
    """
    keys = set(FileSystemReader(folder).read_metadata().state_dict_metadata)
    model = {names.original(n): p.detach() for n, p in parameters.items() if n not in names.parts}
    fused = names.fused(parameters)
    model |= {name: _joined_empty(name, parts, parameters, names) for name, parts in fused.items()}
    states = _empty_states(keys, parameters, names)
    step = torch.tensor(0)
    read_checkpoint({"model": model, "optimizer": dict(states), "step": step}, checkpoint_id=folder)
    for name, parts in fused.items():
        _fill_parts(parts, model[name], parameters, names)
    for n in parameters:
        prefix = f"{names.original(n)}."
        own = {key.removeprefix(prefix): value for key, value in states.items() if key.startswith(prefix)}
        if own:
            optimizer.load_states(n, own)
    return int(step)


def _empty_states(keys: set[str], parameters: Parameters, names: Names) -> dict[str, Tensor]:
    """A tensor to read each saved optimizer state into, laid out as its parameter; counters are scalars."""
    states: dict[str, Tensor] = {}
    for name, p in parameters.items():
        prefix = f"optimizer.{names.original(name)}."
        for key in (k.removeprefix("optimizer.") for k in keys if k.startswith(prefix)):
            states[key] = torch.zeros(()) if key.endswith(".step") else torch.zeros_like(p.detach())
    return states


def _joined_empty(name: str, parts: list[str], parameters: Parameters, names: Names) -> Tensor:
    shape, dim = list(parameters[parts[0]].shape), names.parts[parts[0]][1]
    shape[dim] = sum(names.parts[n][3] for n in parts)
    return torch.empty(shape, dtype=parameters[parts[0]].dtype)


def _fill_parts(parts: list[str], whole: Tensor, parameters: Parameters, names: Names) -> None:
    for n in parts:
        _, dim, start, length = names.parts[n]
        p, value = parameters[n].detach(), whole.narrow(dim, start, length)
        if isinstance(p, DTensor):
            value = DTensor.from_local(value.to(p.device), p.device_mesh, None, run_check=False).redistribute(
                placements=p.placements
            )
        p.copy_(value)
