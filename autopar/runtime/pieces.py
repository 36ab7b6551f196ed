"""Tensors of a checkpoint in pieces: what torch.distributed.checkpoint is told of them, to write and to read.

Its own planners know one block a rank of each tensor. Here a rank may have several, as q and v of a fused qkv, and the
ranks of other stages the rest. All is tensors: a checkpoint of ours has no pickled object.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import (
    create_read_items_for_chunk_list,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.tensor import DTensor

from .data_parallel import local_part
from .reader import Reader


@dataclass(frozen=True)
class Piece:
    """A block of a tensor of shape `size`, from `offsets` on; `values` share the memory of what the program has."""

    values: Tensor
    offsets: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.values.size())

    def inside(self, dim: int, start: int, size: int) -> Piece:
        """The same block of a tensor that has `size` on `dim`, where this one's tensor begins at `start`."""
        offsets, sizes = list(self.offsets), list(self.size)
        offsets[dim], sizes[dim] = offsets[dim] + start, size
        return Piece(self.values, tuple(offsets), tuple(sizes))

    def of_state(self, state: Tensor) -> Piece:
        """The block of an optimizer's state of this block of a parameter; a counter is that of the whole."""
        return replace(self, values=state) if state.dim() else piece_of(state)


Pieces = Mapping[str, Sequence[Piece]]  # key "group.name" → this rank's blocks of that tensor


def piece_of(x: Tensor) -> Piece:
    """This rank's block of a tensor: a shard of a DTensor, all of another."""
    offsets = x.__create_chunk_list__()[0].offsets if isinstance(x, DTensor) else [0] * x.dim()
    return Piece(local_part(x.detach()), tuple(offsets), tuple(x.shape))


def write_pieces(folder: Path, pieces: Pieces) -> None:
    """Write a checkpoint; every rank calls, with its pieces. What several have is written once."""
    try:
        save_checkpoint(dict(pieces), storage_writer=FileSystemWriter(folder), planner=_SavePlanner())
    except CheckpointException as error:
        raise _cause(error) from None


def read_pieces(folder: Path, pieces: Pieces) -> None:
    """Fill pieces from a checkpoint, however it was cut; every rank calls, with its pieces.

    Raises ValueError, on every rank, for a tensor that the checkpoint does not have, or has of another shape.
    """
    try:
        load_checkpoint(dict(pieces), storage_reader=Reader(folder), planner=_LoadPlanner())
    except CheckpointException as error:
        raise _cause(error) from None


def saved_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Shape and dtype of each tensor of a checkpoint, by key."""
    return _tensors_of(Reader(folder).read_metadata())


def _tensors_of(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """A checkpoint's tensors, without what else was put into it."""
    stored = metadata.state_dict_metadata
    return {key: value for key, value in stored.items() if isinstance(value, TensorStorageMetadata)}


class _SavePlanner(DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.is_coordinator = state_dict, is_coordinator
        # For readers of whole checkpoints, which find what is under `model` as one dict.
        self.mappings = {key: tuple(key.split(".", 1)) for key in state_dict}

    def create_local_plan(self) -> SavePlan:
        items = {item.index: item for key, pieces in self.state_dict.items() for item in _write_items(key, pieces)}
        self.plan = SavePlan(list(items.values()), planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        pieces: Sequence[Piece] = self.state_dict[index.fqn]
        return next(piece.values for piece in pieces if piece.values.numel() and piece.offsets == index.offset)


def _write_items(key: str, pieces: Sequence[Piece]) -> Iterator[WriteItem]:
    for piece in pieces:
        if piece.values.numel():  # else it could take the place of the block that begins where it does
            index = MetadataIndex(key, piece.offsets)
            properties = TensorProperties.create_from_tensor(piece.values)
            data = TensorWriteData(piece.chunk, properties, torch.Size(piece.size))
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=data)


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        saved, items = _tensors_of(self.metadata), list[ReadItem]()
        for key, pieces in self.state_dict.items():
            filled = [piece for piece in pieces if piece.values.numel()]
            if filled:
                items += create_read_items_for_chunk_list(
                    key, _checked(key, filled[0], saved), [p.chunk for p in pieces]
                )
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        assert self.metadata is not None
        read = {item.storage_index.fqn for plan in global_plan for item in plan.items}
        left = [key for key in self.metadata.state_dict_metadata if key.startswith("model.") and key not in read]
        if left:
            raise ValueError(f"the checkpoint has {', '.join(left[:5])}, and this program has not: another model's")
        return global_plan

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.index is not None
        piece: Piece = self.state_dict[index.fqn][index.index]
        return piece.values

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise ValueError(f"the checkpoint has an object for {read_item.dest_index.fqn}, and ours have tensors only")


def _checked(key: str, piece: Piece, saved: Mapping[str, TensorStorageMetadata]) -> TensorStorageMetadata:
    if key not in saved:
        raise ValueError(f"the checkpoint has no values for {key!r}")
    stored = saved[key]
    if tuple(stored.size) != piece.size:
        raise ValueError(f"{key!r} has shape {list(piece.size)}, and in the checkpoint {list(stored.size)}")
    return stored


def _cause(error: CheckpointException) -> BaseException:
    """The error that the first rank that failed has raised."""
    rank = min(error.failures)
    cause: BaseException = error.failures[rank][0]
    return cause
