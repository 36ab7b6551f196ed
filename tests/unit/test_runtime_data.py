"""Data: the same global batches under every plan; the default corpus; clear errors."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

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
