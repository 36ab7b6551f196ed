"""The state of a trainer in a checkpoint, saved under one plan and resumed under any.

Keys: `model.<original name>`, `optimizer.<original name>.<state>`, `loss_scale.<state>` of fp16, `rng.<rank>.<stream>`.
A parameter that is whole, in parts or tied in a program is under one name, and so are its states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .data_parallel import local_part
from .optimizer import Optimizer, Parameters
from .parameters import Value
from .pieces import Piece, piece_of, read_pieces, saved_tensors, write_pieces
from .precision import LossScale
from .random import restore_streams, streams
from .weights import WEIGHTS, Names, read_tensors


@dataclass(frozen=True)
class State:
    """Everything of this rank that a checkpoint holds."""

    parameters: Parameters
    optimizer: Optimizer
    names: Names
    buffers: Mapping[str, Tensor]
    loss_scale: LossScale

    def save(self, folder: Path) -> None:
        """Write a checkpoint; every rank calls, and each writes its own parts."""
        pieces = self._pieces({name: self.optimizer.states(name) for name in self.parameters})
        if self.loss_scale.enabled:
            pieces |= _plain("loss_scale", self.loss_scale.state())
        write_pieces(folder, pieces | _plain(f"rng.{dist.get_rank()}", streams()))

    def load(self, folder: Path, resume_streams: bool, resume_optimizer: bool) -> None:
        """Fill all in place from a checkpoint of any plan; every rank calls, and each reads its own parts.

        Optimizer state or a loss scale that is not there starts anew. resume_streams: ranks have the same places in the
        mesh, so each goes on with its own random numbers. resume_optimizer: the optimizer is of the same class.
        """
        saved: dict[str, dict[str, TensorStorageMetadata]] = {}
        for key, stored in saved_tensors(folder).items():
            saved.setdefault(key.rpartition(".")[0], {})[key.rpartition(".")[2]] = stored
        states = {
            name: _empty_states(local_part(p.detach()), saved.get(f"optimizer.{self.names.whole(name)}", {}))
            if resume_optimizer
            else {}
            for name, p in self.parameters.items()
        }
        scale = self.loss_scale.state() if self.loss_scale.enabled and "loss_scale" in saved else {}
        rng = f"rng.{dist.get_rank()}"
        drawn = {key: _empty(stored) for key, stored in saved.get(rng, {}).items() if resume_streams}
        read_pieces(folder, self._pieces(states) | _plain("loss_scale", scale) | _plain(rng, drawn))
        for name, tensors in states.items():
            self.optimizer.load_states(name, tensors)
        if scale:
            self.loss_scale.load(scale)
        restore_streams(drawn)

    def _pieces(self, states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, list[Piece]]:
        """This rank's pieces of model and optimizer, for both directions."""
        pieces = _plain("model", self.buffers)
        for name, p in self.parameters.items():
            whole = self.names.whole(name)
            piece = self.names.piece(name, p)
            pieces.setdefault(f"model.{whole}", []).append(piece)
            for key, state in states[name].items():
                pieces.setdefault(f"optimizer.{whole}.{key}", []).append(piece.of_state(state))
        return pieces


def resumed_values(folder: Path, program: Path) -> Value:
    """Values to build from when resuming: zeros for what the checkpoint has, since `load` fills it in place, each rank
    reading its own pieces only, and the program's own for buffers that are not saved.
    Raises ValueError for what neither has.
    """
    values, saved = read_tensors(program), saved_tensors(folder)

    def value(name: str, shape: torch.Size) -> Tensor:
        if f"model.{name}" in saved:
            return torch.zeros(()).expand(shape)
        if name in values:
            return values[name]
        raise ValueError(f"no values for {name!r}: neither in the checkpoint {folder} nor in {program / WEIGHTS}")

    return value


def _plain(group: str, tensors: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
    return {f"{group}.{name}": [piece_of(x)] for name, x in tensors.items()}


def _empty_states(p: Tensor, saved: Mapping[str, TensorStorageMetadata]) -> dict[str, Tensor]:
    """A tensor to read each saved state of a parameter into: as this rank's part `p` of it, or a counter."""
    return {
        key: torch.zeros_like(p) if stored.size or key != "step" and not p.dim() else _empty(stored)
        for key, stored in saved.items()
    }


def _empty(stored: TensorStorageMetadata) -> Tensor:
    return torch.empty(stored.size, dtype=stored.properties.dtype)
