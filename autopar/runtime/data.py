"""Training samples: any map-style dataset, dealt out so that every plan sees the same global batches."""

from __future__ import annotations

import difflib
import importlib
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

from .mesh import Mesh
from .random import aside, seed_data
from .settings import Settings

BYTE_VOCABULARY = 256
_PATIENCE_S = 20.0  # in which a launcher ends the other ranks, once the first has failed


class Dataset(Protocol):
    """A map-style dataset: sample i is a dict of tensors without a batch dim.

    Random numbers that it draws, of torch, Python or numpy, are alike on every rank and after a resume.
    """

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

    Raises ValueError, on one rank, where there is no such function, the dataset is not map-style or has too few
    samples for a step, or the default corpus does not fit the model: it is token ids, for a vocabulary of bytes.
    """
    with raised_by_one(not dist.is_initialized() or dist.get_rank() == 0), aside():
        seed_data(0)
        dataset = _default(settings) if name is None else _function(name)()
        _check(dataset, "the default data" if name is None else f"--data {name}", settings.global_batch)
        return dataset


@contextmanager
def raised_by_one(first: bool) -> Iterator[None]:
    """Raise an error that several ranks meet on the first of them at once. The others wait for a while, in which the
    launcher ends them: so one traceback is shown.
    """
    try:
        yield
    except Exception:
        if not first:
            with suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is no step to save after
            time.sleep(_PATIENCE_S)
        raise


def _default(settings: Settings) -> Dataset:
    if settings.vocabulary is None:
        raise ValueError(
            "the default data are token ids with labels, and this model takes other inputs: give --data "
            "module:function, which returns a map-style dataset of dicts with the model's inputs"
        )
    if settings.vocabulary < BYTE_VOCABULARY:
        raise ValueError(
            f"the default data are bytes and need a vocabulary of {BYTE_VOCABULARY}; the model's is "
            f"{settings.vocabulary}: give --data module:function"
        )
    return StandardLibrary(settings.tokens, settings.labels)


def _function(name: str) -> Callable[[], Dataset]:
    path, _, function = name.partition(":")
    if not path or not function:
        raise ValueError(f"--data {name}: write module:function, which returns a map-style dataset")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        raise ValueError(f"--data {name}: {path} cannot be imported from {Path.cwd()} ({error})") from error
    functions = {n: value for n, value in vars(module).items() if callable(value)}
    if function not in functions:
        near = difflib.get_close_matches(function, functions, 3)
        meant = f": did you mean {' or '.join(near)}?" if near else f" ({module.__file__})"
        raise ValueError(f"--data {name}: {path} has no function {function!r}{meant}")
    return functions[function]  # type: ignore[no-any-return]


def _check(dataset: Any, what: str, global_batch: int) -> None:
    kind = type(dataset)
    if isinstance(dataset, IterableDataset) or not (hasattr(kind, "__len__") and hasattr(kind, "__getitem__")):
        raise ValueError(
            f"{what} gives a {kind.__name__}, which is not map-style: it must have len(dataset) and dataset[i], so "
            "that samples are dealt out alike under every plan; an iterable one is not supported yet"
        )
    if not len(dataset):
        raise ValueError(f"{what} gives an empty dataset ({kind.__name__}): len(dataset) is 0")
    if len(dataset) < global_batch:
        raise ValueError(
            f"{what} gives {len(dataset)} samples, and a step takes {global_batch} (global_batch): give more, or plan "
            f"with a global_batch of at most {len(dataset)}"
        )


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
        with raised_by_one(not any(self._mesh.rank(axis) for axis in ("pp", "cp", "tp"))), aside():
            indices = [self._index(n) for n in range(first, first + size)]
            batch = _stack(indices, [self._sample(index, n) for n, index in enumerate(indices, first)])
        return {name: x.to(self._mesh.device) for name, x in batch.items()}

    def _sample(self, index: int, n: int) -> dict[str, Tensor]:
        """Sample `index` of the dataset, the n-th of the run, as tensors; ValueError naming it where it is none."""
        seed_data(self._seed * 0x9E3779B97F4A7C15 + n)
        try:
            sample = self._dataset[index]
        except Exception as error:
            raise ValueError(f"sample {index} of the dataset: {type(error).__name__}: {error}") from error
        if not hasattr(sample, "items"):
            raise ValueError(f"sample {index} of the dataset is a {type(sample).__name__}: return a dict of inputs")
        tensors: dict[str, Tensor] = {}
        for name, value in sample.items():
            try:
                tensors[name] = torch.as_tensor(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(f"sample {index} of the dataset: {name!r} makes no tensor: {error}") from error
        return tensors

    def _index(self, n: int) -> int:
        epoch, position = divmod(n, len(self._dataset))
        if not self._shuffle:
            return position
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self._dataset), generator=generator)
        return int(self._order[position])


def _stack(indices: Sequence[int], samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The samples on a new dim 0; ValueError naming one that has other inputs or shapes than the first."""
    first = {name: list(x.shape) for name, x in samples[0].items()}
    for index, sample in zip(indices, samples, strict=True):
        if (shapes := {name: list(x.shape) for name, x in sample.items()}) != first:
            raise ValueError(
                f"sample {index} of the dataset is {_shown(shapes)}, sample {indices[0]} is {_shown(first)}: give all "
                "the same inputs and shapes (pad or cut them)"
            )
    return {name: torch.stack([sample[name] for sample in samples]) for name in first}


def _shown(shapes: Mapping[str, list[int]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())


def padded(batch: Mapping[str, Tensor], padding: Iterable[tuple[str, int, int]], sequence: int) -> dict[str, Tensor]:
    """The batch with each dim of `padding`, (input, dim, value), as long as the planned sequence.

    Pads come last and targets there are ignored: autopar has run this model on drawn samples with and without pads,
    and found the same loss and gradients up to rounding. Where dropout draws, its masks are others for each length, of
    the same distribution.
    """
    result = dict(batch)
    for name, dim, value in padding:
        x = result[name]
        sizes = list(x.shape)
        sizes[dim] = sequence - sizes[dim]
        result[name] = torch.cat([x, x.new_full(sizes, value)], dim)
    return result
