"""Saving and resuming with torch.distributed.checkpoint, under any plan.

Keys: `model.<original name>` (tied parameters once), `optimizer.<parameter name>.<state>`, `step`,
`loss_scale.<state>` of fp16.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as read_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as write_checkpoint
from torch.distributed.tensor import DTensor

from .optimizer import Optimizer, Parameters
from .parameters import Value
from .precision import LossScale
from .weights import WEIGHTS, Names, read_tensors


def full(x: Tensor) -> Tensor:
    """The whole of a sharded tensor, on every rank that holds a part; all of them must call."""
    if isinstance(x, DTensor):
        x = x.detach().to(x.device_mesh.device_type)  # offloaded parts are on the host
    return x.full_tensor() if isinstance(x, DTensor) else x.detach()


def save(
    folder: Path,
    parameters: Parameters,
    optimizer: Optimizer,
    names: Names,
    step: int,
    buffers: Mapping[str, Tensor],
    loss_scale: LossScale,
) -> None:
    """Every rank calls; each writes its own parts."""
    model = {names.original(n): p.detach() for n, p in parameters.items() if names.original(n) not in names.parts}
    model |= buffers
    model |= names.join({n: full(p) for n, p in parameters.items() if n in names.parts})
    states = {f"{names.original(n)}.{key}": value for n in parameters for key, value in optimizer.states(n).items()}
    saved = {"model": model, "optimizer": states, "step": torch.tensor(step)}
    if loss_scale.enabled:
        saved["loss_scale"] = loss_scale.state()
    write_checkpoint(saved, checkpoint_id=folder)


def resumed_values(folder: Path, names: Names, program: Path) -> Value:
    """Values to build from when resuming: those of fused parameters, whose parts a checkpoint does not have,
    and the program's own buffers. `load` fills the others in place, each rank reading its own parts only.
    Raises ValueError for what neither has.
    """
    own = read_tensors(program)
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    fused = {part[0] for part in names.parts.values()}

    def value(name: str, shape: torch.Size) -> Tensor:
        if name in own:
            return own[name]
        if f"model.{name}" not in saved:
            raise ValueError(f"no values for {name!r}: neither in the checkpoint {folder} nor in {program / WEIGHTS}")
        if name not in fused:
            return torch.zeros(()).expand(shape)
        whole = torch.empty(shape, dtype=torch.float64)  # holds every precision exactly
        read_checkpoint({"model": {name: whole}}, checkpoint_id=folder, no_dist=True)
        return whole

    return value


def load(
    folder: Path, parameters: Parameters, optimizer: Optimizer, names: Names, buffers: Mapping[str, Tensor]
) -> int:
    """Fill parameters, optimizer state and buffers in place from a checkpoint of any plan; returns its step.

    Every rank calls; each reads its own parts. Optimizer state that is not there starts anew.
    """
    keys = FileSystemReader(folder).read_metadata().state_dict_metadata
    kept: dict[str, str] = {
        names.original(n): n for n in reversed(list(parameters))
    }  # of tied copies the first is read
    model = {original: parameters[n].detach() for original, n in kept.items() if n not in names.parts}
    model |= buffers
    states = {n: _empty_states(f"optimizer.{original}.", parameters[n], keys) for original, n in kept.items()}
    flat = {f"{names.original(n)}.{key}": value for n, own in states.items() for key, value in own.items()}
    step = torch.tensor(0)
    read_checkpoint({"model": model, "optimizer": flat, "step": step}, checkpoint_id=folder)
    for name, p in parameters.items():
        first = kept[names.original(name)]
        own = states[first]
        if name != first:
            p.detach().copy_(parameters[first].detach())
            own = {key: value.clone() for key, value in own.items()}
        optimizer.load_states(name, own)
    return int(step)


def load_loss_scale(folder: Path, loss_scale: LossScale) -> None:
    """Go on with the loss scale of a checkpoint of an fp16 program; without one it starts anew."""
    if loss_scale.enabled and "loss_scale.scale" in FileSystemReader(folder).read_metadata().state_dict_metadata:
        state = loss_scale.state()
        read_checkpoint({"loss_scale": state}, checkpoint_id=folder)
        loss_scale.load(state)


def _empty_states(prefix: str, p: nn.Parameter, keys: Iterable[str]) -> dict[str, Tensor]:
    """A tensor to read each saved optimizer state into, laid out as its parameter; counters are scalars."""
    saved = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
    return {key: torch.zeros(()) if key == "step" else torch.zeros_like(p.detach()) for key in saved}
