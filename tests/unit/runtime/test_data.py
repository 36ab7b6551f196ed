"""Data: the same global batches under every plan; the default corpus; clear errors."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch import Tensor

from autopar.runtime import data
from autopar.runtime.data import Loader, StandardLibrary, load_dataset
from autopar.runtime.parameters import chunk_range
from autopar.runtime.weights import Names, draw
from tests.distributed.handwritten import make_settings


@dataclass(frozen=True)
class Numbers:
    size: int = 20

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": [index, index]}


def global_batches(dp: int, steps: int, **options: Any) -> list[list[int]]:
    """Sample numbers of each step, the replicas' batches one after the other."""
    settings = make_settings(dp=dp)
    loaders = []
    for replica in range(dp):
        mesh: Any = SimpleNamespace(settings=settings, device=torch.device("cpu"), rank=lambda _, r=replica: r)
        loaders.append(Loader(Numbers(), mesh, **options))
    starts = range(0, steps * settings.global_batch, settings.global_batch)
    batches: list[list[Tensor]] = [[loader.batch(n)["input_ids"][:, 0] for loader in loaders] for n in starts]
    return [torch.cat(parts).tolist() for parts in batches]


def test_without_shuffle_step_k_takes_the_samples_in_order_and_goes_round() -> None:
    for dp in (1, 2, 4):
        batches = global_batches(dp, 3, shuffle=False, seed=0)
        assert batches == [list(range(8)), list(range(8, 16)), [16, 17, 18, 19, 0, 1, 2, 3]]


class Drawn(Numbers):
    """Masks its samples at random, as for masked language modelling, in three ways."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": [index, torch.rand(()), random.random(), np.random.rand()]}


def test_what_a_dataset_draws_is_the_same_on_every_rank_and_none_of_the_model_s() -> None:
    def drawn(state: int, dp: int) -> tuple[Tensor, Tensor]:
        """The second global batch, on ranks whose streams are elsewhere, and what the model draws next."""
        torch.manual_seed(state)
        random.seed(state)
        np.random.seed(state)  # noqa: NPY002 - as datasets do
        settings, parts = make_settings(dp=dp), []
        for replica in range(dp):
            mesh: Any = SimpleNamespace(settings=settings, device=torch.device("cpu"), rank=lambda _, r=replica: r)
            loader = Loader(Drawn(), mesh, shuffle=True, seed=1)
            parts.append(loader.batch(settings.global_batch)["input_ids"])
        return torch.cat(parts), torch.rand(3)

    (one, after), (two, after_two) = drawn(1, dp=1), drawn(2, dp=2)
    assert torch.equal(one, two) and one.unique().numel() == 4 * 8
    assert torch.equal(after, torch.rand(3, generator=torch.Generator().manual_seed(1)))
    assert not torch.equal(after, after_two)


def test_a_dataset_that_is_drawn_is_the_same_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    mine: Any = ModuleType("mine")
    mine.make = lambda: [{"x": torch.rand(2), "y": random.random()} for _ in range(8)]
    monkeypatch.setitem(sys.modules, "mine", mine)
    found = []
    for state in (1, 2):
        torch.manual_seed(state)
        found.append(load_dataset("mine:make", make_settings())[7])
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(state)))
    assert torch.equal(found[0]["x"], found[1]["x"]) and found[0]["y"] == found[1]["y"]


def test_shuffled_order_depends_on_the_seed_alone_and_covers_each_epoch() -> None:
    one, two = (global_batches(dp, 5, shuffle=True, seed=7) for dp in (1, 2))
    assert one == two
    assert one != global_batches(1, 5, shuffle=True, seed=8)
    flat = [n for batch in one for n in batch]
    assert sorted(flat[:20]) == sorted(flat[20:]) == list(range(20))
    assert flat[:20] != flat[20:]


def test_default_corpus_is_the_standard_library_in_windows() -> None:
    next_token, same = StandardLibrary(16), StandardLibrary(16, labels="same")
    assert len(next_token) > 100_000
    assert torch.equal(next_token[3]["labels"][:-1], next_token[3]["input_ids"][1:])
    assert torch.equal(next_token[3]["labels"][-1:], next_token[4]["input_ids"][:1])
    assert torch.equal(same[3]["labels"], same[3]["input_ids"])
    assert next_token[0]["input_ids"].dtype is torch.int64 and len(next_token[0]["input_ids"]) == 16


def test_errors_name_the_way_out() -> None:
    with pytest.raises(ValueError, match="vocabulary of 256; the model's is 97: give --data module:function"):
        load_dataset(None, make_settings(vocabulary=97))
    with pytest.raises(ValueError, match="--data numbers: write module:function"):
        load_dataset("numbers", make_settings())


def test_chunks_follow_the_rule_of_dtensor() -> None:
    assert [chunk_range(97, 4, i) for i in range(4)] == [(0, 25), (25, 50), (50, 75), (75, 97)]
    assert [chunk_range(3, 4, i) for i in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 3)]


def test_names_split_and_join_a_fused_parameter() -> None:
    names = Names({}, {"q": ("qkv", 1, 0, 4), "k": ("qkv", 1, 4, 2), "v": ("qkv", 1, 6, 2)})
    fused = torch.randn(3, 8)

    def values(name: str, shape: torch.Size) -> Tensor:
        assert name == "qkv" and shape == (3, 8)
        return fused

    parts = {n: names.value(values)(n, torch.Size((3, size))) for n, size in (("q", 4), ("k", 2), ("v", 2))}
    assert torch.equal(names.join({**parts, "w": fused})["qkv"], fused)
    assert names.join({**parts, "w": fused}).keys() == {"qkv", "w"}


def test_recorded_ops_are_seeded_by_name() -> None:
    recipe: list[list[object]] = [["uniform_", -1.0, 1.0], ["erfinv_"], ["mul_", 0.02], ["clamp_", -0.04, 0.04]]
    a, again, b = (draw(recipe, torch.Size((50, 4)), 0, name) for name in ("a", "a", "b"))
    assert torch.equal(a, again) and not torch.equal(a, b)
    assert a.abs().max() <= 0.04 and 0.01 < a.std() < 0.03


def test_the_default_data_are_for_token_models() -> None:
    with pytest.raises(ValueError, match="this model takes other inputs: give --data module:function"):
        load_dataset(None, make_settings(vocabulary=None))


@dataclass(frozen=True)
class Samples:
    """Sample i of a list, which may be an error to raise."""

    rows: list[Any]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.rows[index], Exception):
            raise self.rows[index]
        return self.rows[index]


class Stream(torch.utils.data.IterableDataset[Any]):
    """torch's own has a __getitem__, which raises."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


GOOD = {"input_ids": [1, 2]}
BAD_DATASETS = {
    "empty": (Samples([]), r"--data mine:\w+ gives an empty dataset \(Samples\): len\(dataset\) is 0"),
    "few": (Samples([GOOD] * 7), r"gives 7 samples, and a step takes 8 \(global_batch\): .* at most 7"),
    "stream": (Stream(), "gives a Stream, which is not map-style: it must have len"),
    "generator": ((GOOD for _ in range(9)), "gives a generator, which is not map-style: it must have len"),
}
BAD_SAMPLES = {
    "raises": (KeyError("text"), "sample 5 of the dataset: KeyError: 'text'"),
    "tuple": (([1, 2], 3), "sample 5 of the dataset is a tuple: return a dict of inputs"),
    "text": ({"input_ids": "one two"}, "sample 5 of the dataset: 'input_ids' makes no tensor"),
    "shape": ({"input_ids": [1, 2, 3]}, r"sample 5 of the dataset is input_ids \[3\], sample 4 is input_ids \[2\]"),
    "names": ({"ids": [1, 2]}, r"sample 5 of the dataset is ids \[2\], sample 4 is input_ids \[2\]"),
}


@pytest.mark.parametrize("kind", BAD_DATASETS)
def test_a_dataset_that_cannot_be_trained_on_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, said = BAD_DATASETS[kind]
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(make=lambda: dataset))
    with pytest.raises(ValueError, match=said):
        load_dataset("mine:make", make_settings())


def test_a_function_that_is_missing_is_named_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("mine")
    module.make_data, module.__file__ = Numbers, "mine.py"
    monkeypatch.setitem(sys.modules, "mine", module)
    with pytest.raises(ValueError, match=r"mine has no function 'make_date': did you mean make_data\?"):
        load_dataset("mine:make_date", make_settings())
    with pytest.raises(ValueError, match="--data no_such:f: no_such cannot be imported from"):
        load_dataset("no_such:f", make_settings())


def loader_of(rows: list[Any], **ranks: int) -> Loader:
    """On a rank of two replicas with four samples each."""
    mesh: Any = SimpleNamespace(
        settings=make_settings(dp=2, tp=2), device=torch.device("cpu"), rank=lambda axis: ranks.get(axis, 0)
    )
    return Loader(Samples(rows), mesh, shuffle=False, seed=0)


@pytest.mark.parametrize("kind", BAD_SAMPLES)
def test_a_bad_sample_is_named(kind: str) -> None:
    sample, said = BAD_SAMPLES[kind]
    rows = [*[GOOD] * 5, sample, *[GOOD] * 4]
    assert loader_of(rows).batch(0)["input_ids"].shape == (4, 2), "the other replica has it"
    with pytest.raises(ValueError, match=said):
        loader_of(rows, dp=1).batch(0)


def test_one_rank_tells_what_all_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank of tp waits for the launcher to end it; where nobody does, it tells its error too."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    rows = [KeyError("text")] * 8
    for tp in (0, 1):
        with pytest.raises(ValueError, match="sample 0"):
            loader_of(rows, tp=tp).batch(0)
        assert len(waited) == tp
    for rank in (0, 1):
        monkeypatch.setattr(data, "dist", SimpleNamespace(is_initialized=lambda: True, get_rank=[rank].pop))
        with pytest.raises(ValueError, match="no_such"):
            load_dataset("no_such:f", make_settings())
        assert len(waited) == 1 + rank
