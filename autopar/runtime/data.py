"""Training samples: any map-style dataset, dealt out so that every plan sees the same global batches."""

from __future__ import annotations

import importlib
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .mesh import Mesh
from .settings import Settings

BYTE_VOCABULARY = 256


class Dataset(Protocol):
    """A map-style dataset: sample i is a dict of tensors without a batch dim."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


class StandardLibrary:
    """The bytes of Python's standard-library source, a real corpus that is on every machine.

    Sample i has bytes i·s … (i+1)·s−1 of the files in the order of their paths. `labels`: "next", the byte
    after each, or "same", where the model itself shifts.
    """

    def __init__(self, sequence: int, labels: str = "next") -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        elsewhere = {"site-packages", "dist-packages", "test"}
        files = sorted(path for path in root.rglob("*.py") if not elsewhere & set(path.parts))
        self._bytes = b"".join(path.read_bytes() for path in files)
        self._sequence, self._shift = sequence, 1 if labels == "next" else 0

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self._sequence

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        first = index * self._sequence
        window = torch.tensor(list(self._bytes[first : first + self._sequence + 1]))
        return {"input_ids": window[:-1], "labels": window[self._shift :][: self._sequence]}


def load_dataset(name: str | None, settings: Settings) -> Dataset:
    """The dataset that `module:function` returns, called without arguments; None is the default corpus.

    Raises ValueError where the default corpus does not fit the model: it is token ids, for a vocabulary of bytes.
    """
    if name is None:
        if settings.vocabulary is None:
            raise ValueError(
                "the default data are token ids with labels, and this model takes other inputs: give --data "
                "module:function, which returns a map-style dataset of dicts with the model's inputs"
            )
        if settings.vocabulary is not None and settings.vocabulary < BYTE_VOCABULARY:
            raise ValueError(
                f"the default data are bytes and need a vocabulary of {BYTE_VOCABULARY}; the model's is "
                f"{settings.vocabulary}: give --data module:function"
            )
        return StandardLibrary(settings.tokens, settings.labels)
    module, _, function = name.partition(":")
    if not function:
        raise ValueError(f"--data {name}: write module:function, which returns a map-style dataset")
    sys.path.insert(0, str(Path.cwd()))
    dataset: Dataset = getattr(importlib.import_module(module), function)()
    return dataset


class Loader:
    """Each step trains on the next B samples, in the dataset's order or in one shuffled anew each epoch.

    Past the end it goes round. The order depends on the seed alone, never on the plan.
    """

    def __init__(self, dataset: Dataset, mesh: Mesh, *, shuffle: bool, seed: int) -> None:
        self._dataset, self._mesh, self._shuffle, self._seed = dataset, mesh, shuffle, seed
        self._epoch, self._order = -1, torch.empty(0)

    def batch(self, consumed: int) -> dict[str, Tensor]:
        """This replica's samples of the step after `consumed` samples, stacked on dim 0, on the device."""
        settings = self._mesh.settings
        size = settings.global_batch // settings.dp
        first = consumed + self._mesh.rank("dp") * size
        samples = [self._dataset[self._index(n)] for n in range(first, first + size)]
        return {
            key: torch.stack([torch.as_tensor(sample[key]) for sample in samples]).to(self._mesh.device)
            for key in samples[0]
        }

    def _index(self, n: int) -> int:
        epoch, position = divmod(n, len(self._dataset))
        if not self._shuffle:
            return position
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self._dataset), generator=generator)
        return int(self._order[position])
