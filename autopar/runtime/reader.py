"""The one reader of a checkpoint's files.

torch reads tensors as tensors, but the list of them, which is a pickle, as any pickle: it would run what that names.
"""

from __future__ import annotations

import pickle
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

LIST = ".metadata"
_NAMES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
    },
}  # fmt: skip


class Reader(FileSystemReader):
    """torch's reader, but for the list of tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The list of tensors; ValueError where it names what no list has, or a file that is not beside it."""
        path = Path(self.path) / LIST
        try:
            with path.open("rb") as file:
                listed = _ListUnpickler(file).load()
            files = {item.relative_path for item in listed.storage_data.values()}
            if not isinstance(listed, Metadata) or any(name != Path(name).name for name in files):
                raise ValueError("it is of other files")
        except FileNotFoundError:
            raise
        except Exception as error:  # of pickle, or of a class given other arguments than its own
            raise ValueError(f"{path} is damaged, or no list of tensors ({error}): it is not loaded") from error
        listed.storage_meta = StorageMeta(load_id=self.load_id)
        return listed


class _ListUnpickler(pickle.Unpickler):
    """Builds what the list of tensors is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _NAMES.get(module, ()):
            return _maker(super().find_class(module, name))
        if module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype):
            return super().find_class(module, name)
        if module.partition(".")[0] == "pathlib" and name.endswith("Path"):
            return lambda *parts: None  # where it was saved, which nobody reads
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _maker(named: Any) -> Any:
    """A stand-in that makes what a class or function makes: a pickle can set the attributes of all that it names."""
    if named is torch.Size:  # has none that can be set
        return named
    if not is_dataclass(named):
        return lambda *arguments: named(*arguments)

    def set_state(self: Any, state: Any) -> None:  # of an instance; of the class, it lacks `self`
        object.__setattr__(self, "__class__", named)
        self.__setstate__(state) if hasattr(named, "__setstate__") else vars(self).update(state)

    return type("Stored", (named,), {"__setstate__": set_state})  # type: ignore[arg-type]
