"""Hostile files in a checkpoint: its list of tensors, its tensors and objects, and a recorded initialisation."""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from autopar.runtime.pieces import Piece, piece_of, read_pieces, saved_tensors, write_pieces
from autopar.runtime.weights import draw, read_tensors
from tests.hostile import Hostile

METADATA, FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
W = torch.arange(12.0).reshape(3, 4)


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    dist.init_process_group("gloo", f"file://{tmp_path_factory.mktemp('ranks')}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_pieces(tmp_path / "step-1", {"model.w": [piece_of(W)], "model.b": [piece_of(torch.ones(2).bfloat16())]})
    return tmp_path / "step-1"


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[Hostile]:
    yield Hostile(tmp_path / "canary")
    assert not (tmp_path / "canary").exists(), "a file was executed"


def test_a_checkpoint_is_read(folder: Path) -> None:
    sizes = {key: tuple(found.size) for key, found in saved_tensors(folder).items()}
    assert sizes == {"model.w": (3, 4), "model.b": (2,)}
    read = torch.zeros(3, 4)
    read_pieces(folder, {"model.w": [piece_of(read)], "model.b": [piece_of(torch.zeros(2))]})
    assert torch.equal(read, W)


class Reduced:
    """A pickle that calls a function by its name."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call[0], self.call[1:]


def changed(folder: Path, **parts: Any) -> Metadata:
    found: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return replace(found, **parts)


LISTS: dict[str, Callable[[Path, Hostile], Any]] = {
    "that runs": lambda folder, hostile: hostile,
    "that runs inside": lambda folder, hostile: changed(folder, planner_data={"model.w": hostile}),
    "that runs by another name": lambda folder, hostile: Reduced(os.system, f"touch {hostile.canary}"),
    "that evaluates": lambda folder, hostile: Reduced(eval, f"open({str(hostile.canary)!r}, 'w')"),
    "that gets an attribute": lambda folder, hostile: Reduced(getattr, "x", "upper"),
    "that loads": lambda folder, hostile: Reduced(torch.load, str(hostile.canary)),
    "that is another thing": lambda folder, hostile: [1, 2],
    "of files elsewhere": lambda folder, hostile: changed(folder, storage_data=_elsewhere(folder)),
}


def _elsewhere(folder: Path) -> Any:
    return {key: replace(item, relative_path=f"../{item.relative_path}") for key, item in
            changed(folder).storage_data.items()}  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_a_hostile_list_is_not_loaded(name: str, folder: Path, hostile: Hostile) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(LISTS[name](folder, hostile)))
    with pytest.raises(ValueError, match=r"\.metadata is damaged, or no list of tensors"):
        saved_tensors(folder)
    with pytest.raises(AssertionError, match=r"\.metadata is damaged, or no list of tensors"):  # torch's, of ours
        read_pieces(folder, {"model.w": [piece_of(torch.zeros(3, 4))], "model.b": [piece_of(torch.zeros(2))]})


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("pathlib", "PosixPath"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        *((METADATA, name) for name in ("Metadata", "MetadataIndex", "TensorProperties", "_MEM_FORMAT_ENCODING")),
        (FILESYSTEM, "_StorageInfo"),
    ],
)
def test_a_list_does_not_change_what_it_names(module: str, name: str, folder: Path) -> None:
    """A pickle may set attributes of what it names: of pathlib's classes, say, for the rest of the process."""
    named = getattr(importlib.import_module(module), name)
    state = pickle.dumps((None, {"spoilt": 1}), 2)[2:-1]
    (folder / ".metadata").write_bytes(b"\x80\x02" + f"c{module}\n{name}\n".encode() + state + b"b.")
    with pytest.raises(ValueError, match=r"\.metadata is damaged, or no list of tensors"):
        saved_tensors(folder)
    assert not hasattr(named, "spoilt")
    assert not hasattr(Path, "spoilt")


@pytest.mark.parametrize("length", [0, 1, 100])
def test_a_truncated_list_is_one_error(length: int, folder: Path) -> None:
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:length])
    with pytest.raises(ValueError, match=r"\.metadata is damaged"):
        saved_tensors(folder)


@pytest.mark.parametrize("form", [Hostile.zipped, Hostile.pickled], ids=["as torch saves", "a pickle"])
def test_a_hostile_tensor_is_not_loaded(form: Callable[[Hostile], bytes], folder: Path, hostile: Hostile) -> None:
    """In the place of a tensor lies what runs."""
    (file,), data = folder.glob("*.distcp"), form(hostile)
    file.write_bytes(data)
    items = {key: replace(item, offset=0, length=len(data)) for key, item in changed(folder).storage_data.items()}
    (folder / ".metadata").write_bytes(pickle.dumps(changed(folder, storage_data=items)))
    with pytest.raises(pickle.UnpicklingError, match="weights_only|Weights only"):
        read_pieces(folder, {"model.w": [piece_of(torch.zeros(3, 4))], "model.b": [piece_of(torch.zeros(2))]})


def test_a_hostile_object_is_not_loaded(tmp_path: Path, hostile: Hostile) -> None:
    """torch would unpickle the entries that are no tensors; none of a checkpoint of ours is one."""
    save({"model": {"w": hostile}, "step": hostile}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    hostile.canary.unlink(missing_ok=True)
    with pytest.raises(ValueError, match="has no values for 'model.w'"):
        read_pieces(tmp_path / "theirs", {"model.w": [Piece(torch.zeros(()), (), ())]})
    assert saved_tensors(tmp_path / "theirs") == {}


def test_hostile_weights_are_not_loaded(tmp_path: Path, hostile: Hostile) -> None:
    (tmp_path / "weights.pt").write_bytes(hostile.zipped())
    with pytest.raises(pickle.UnpicklingError, match="Weights only"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("op", ["__setattr__", "numpy", "share_memory", "__class__", "_", "normal", "Fill_", "x.y_", 3])
def test_a_recorded_initialisation_is_of_ops_in_place(op: Any) -> None:
    with pytest.raises(ValueError, match="which is no op in place"):
        draw([[op]], torch.Size([2]), 0, "w")


@pytest.mark.parametrize("op", [["normal_", 0.0, 0.1], ["zero_"], ["log_normal_"], ["part", 0, 1, "fill_", 2.0]])
def test_what_is_recorded_is_drawn(op: list[Any]) -> None:
    assert draw([["zero_"], op], torch.Size([2]), 0, "w").isfinite().all()
