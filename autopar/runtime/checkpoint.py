"""What a checkpoint holds, and how a trainer is saved to it and resumed from it, under any plan.

Keys: `model.<original name>`, `optimizer.<original name>.<state>`, `step`, `loss_scale.<state>` of fp16. A parameter
that is whole, in parts or tied in a program is under one name, and so are its states.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .optimizer import Optimizer, Parameters
from .parameters import Value
from .pieces import Piece, piece_of, read_pieces, saved_tensors, write_pieces
from .precision import LossScale
from .weights import WEIGHTS, Names, read_tensors


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
    pieces = _pieces(parameters, {name: optimizer.states(name) for name in parameters}, names, buffers)
    pieces["step"] = [piece_of(torch.tensor(step))]
    if loss_scale.enabled:
        pieces |= _of_loss_scale(loss_scale.state())
    write_pieces(folder, pieces)


def resumed_values(folder: Path, program: Path) -> Value:
    """Values to build from when resuming: zeros for what the checkpoint has, since `load` fills it in place, each rank
    reading its own pieces only, and the program's own for buffers that are not saved.
    Raises ValueError for what neither has.
    """
    own, saved = read_tensors(program), saved_tensors(folder)

    def value(name: str, shape: torch.Size) -> Tensor:
        if f"model.{name}" in saved:
            return torch.zeros(()).expand(shape)
        if name in own:
            return own[name]
        raise ValueError(f"no values for {name!r}: neither in the checkpoint {folder} nor in {program / WEIGHTS}")

    return value


def load(
    folder: Path, parameters: Parameters, optimizer: Optimizer, names: Names, buffers: Mapping[str, Tensor]
) -> int:
    """Fill parameters, optimizer state and buffers in place from a checkpoint of any plan; returns its step.

    Every rank calls; each reads its own pieces. Optimizer state that is not there starts anew.
    """
    saved: dict[str, dict[str, TensorStorageMetadata]] = {}
    for key, state in saved_tensors(folder).items():
        saved.setdefault(key.rpartition(".")[0], {})[key.rpartition(".")[2]] = state
    states = {
        name: _empty_states(p.detach(), saved.get(f"optimizer.{names.whole(name)}", {}))
        for name, p in parameters.items()
    }
    step = torch.tensor(0)
    read_pieces(folder, _pieces(parameters, states, names, buffers) | {"step": [piece_of(step)]})
    for name, own in states.items():
        optimizer.load_states(name, own)
    return int(step)


def load_loss_scale(folder: Path, loss_scale: LossScale) -> None:
    """Go on with the loss scale of a checkpoint of an fp16 program; without one it starts anew."""
    if loss_scale.enabled and "loss_scale.scale" in saved_tensors(folder):
        state = loss_scale.state()
        read_pieces(folder, _of_loss_scale(state))
        loss_scale.load(state)


def _pieces(
    parameters: Parameters, states: Mapping[str, Mapping[str, Tensor]], names: Names, buffers: Mapping[str, Tensor]
) -> dict[str, list[Piece]]:
    """This rank's pieces of model and optimizer, for both directions."""
    pieces = {f"model.{name}": [piece_of(b)] for name, b in buffers.items()}
    for name, p in parameters.items():
        whole = names.whole(name)
        pieces.setdefault(f"model.{whole}", []).append(names.piece(name, p))
        for key, state in states[name].items():
            pieces.setdefault(f"optimizer.{whole}.{key}", []).append(names.piece(name, state))
    return pieces


def _of_loss_scale(state: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
    return {f"loss_scale.{name}": [piece_of(value)] for name, value in state.items()}


def _empty_states(p: Tensor, saved: Mapping[str, TensorStorageMetadata]) -> dict[str, Tensor]:
    """A tensor to read each saved state of a parameter into: laid out as the parameter, or a counter."""
    return {
        key: torch.zeros_like(p) if state.size or key != "step" and not p.dim() else _counter(state)
        for key, state in saved.items()
    }


def _counter(state: TensorStorageMetadata) -> Tensor:
    return torch.zeros((), dtype=state.properties.dtype)
