"""Each conversion, forward and backward, against its definition on the tensors of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime import collectives as c
from autopar.runtime.loss import cross_entropy, embedding
from autopar.runtime.mesh import init_mesh
from autopar.runtime.parameters import chunk_range
from tests.distributed.handwritten import make_settings
from tests.harness import run_ranks

Map = Callable[[list[Tensor], int], Tensor]  # the tensors of all ranks, this rank → its tensor


def same(xs: list[Tensor], r: int) -> Tensor:
    return xs[r]


def total(xs: list[Tensor], r: int) -> Tensor:
    return torch.stack(xs).sum(0)


def first(xs: list[Tensor], r: int) -> Tensor:
    return xs[r] if r == 0 else torch.zeros_like(xs[r])


def part(dim: int) -> Map:
    return lambda xs, r: xs[r].chunk(len(xs), dim)[r]


def whole(dim: int) -> Map:
    return lambda xs, r: torch.cat(xs, dim)


def scatter(dim: int) -> Map:
    return lambda xs, r: total(xs, r).chunk(len(xs), dim)[r]


def pad(dim: int) -> Map:
    return lambda xs, r: torch.cat([xs[r] if i == r else torch.zeros_like(xs[r]) for i in range(len(xs))], dim)


def exchange(i: int, j: int) -> Map:
    return lambda xs, r: torch.cat([x.chunk(len(xs), j)[r] for x in xs], i)


Row = tuple[Callable[[Tensor], Tensor], Map, Map]  # the conversion, its map of the value and of the gradient


def rows_with_dim(dim: int) -> dict[str, Row]:
    other = (dim + 1) % 3
    return {
        "split": (partial(c.split, dim=dim, axis="tp"), part(dim), whole(dim)),
        "gather": (partial(c.gather, dim=dim, axis="tp"), whole(dim), part(dim)),
        "all_gather": (partial(c.all_gather, dim=dim, axis="tp"), whole(dim), scatter(dim)),
        "reduce_scatter": (partial(c.reduce_scatter, dim=dim, axis="tp"), scatter(dim), whole(dim)),
        "take_shard": (partial(c.take_shard, dim=dim, axis="tp"), part(dim), pad(dim)),
        "pad_shard": (partial(c.pad_shard, dim=dim, axis="tp"), pad(dim), part(dim)),
        "all_to_all": (
            partial(c.all_to_all, from_dim=dim, to_dim=other, axis="tp"),
            exchange(dim, other),
            exchange(other, dim),
        ),
    }


ROWS: dict[str, Row] = {
    "copy_to": (partial(c.copy_to, axis="tp"), same, total),
    "all_reduce": (partial(c.all_reduce, axis="tp"), total, same),
    "grad_from_first": (partial(c.grad_from_first, axis="tp"), same, first),
    "value_from_first": (partial(c.value_from_first, axis="tp"), first, same),
    "all_reduce_both": (partial(c.all_reduce_both, axis="tp"), total, total),
    "both_from_first": (partial(c.both_from_first, axis="tp"), first, first),
    **{f"{name}({dim})": row for dim in range(3) for name, row in rows_with_dim(dim).items()},
}


def noise(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tp", [2, 4])
def test_value_and_gradient_of_each_conversion(tp: int) -> None:
    def rank_main(rank: int) -> None:
        init_mesh(make_settings(tp=tp), "cpu")
        for name, (convert, value, gradient) in ROWS.items():
            xs = [noise(r, (4, 8, 12)).transpose(0, 1) for r in range(tp)]  # not contiguous
            x = xs[rank].clone().requires_grad_()
            kept = x.detach().clone()
            y = convert(x)
            torch.testing.assert_close(y, value(xs, rank), msg=f"value of {name}")
            grads = [noise(100 + r, tuple(y.shape)) for r in range(tp)]
            kept_grad = grads[rank].clone()
            y.backward(grads[rank])
            assert x.grad is not None
            torch.testing.assert_close(x.grad, gradient(grads, rank), msg=f"gradient of {name}")
            assert torch.equal(x, kept) and torch.equal(grads[rank], kept_grad), f"{name} changed its input"

    run_ranks(tp, rank_main)


def test_conversions_do_nothing_on_one_rank() -> None:
    def rank_main(rank: int) -> None:
        init_mesh(make_settings(), "cpu")
        x = noise(0, (2, 3, 4))
        assert all(convert(x) is x for convert, _, _ in ROWS.values())

    run_ranks(1, rank_main)


@pytest.mark.parametrize("vocabulary", [3, 32, 97])  # 3 over 4: a rank without rows; 97: uneven
@pytest.mark.parametrize("tp", [2, 4])
def test_vocabulary_parallel_embedding_and_loss(tp: int, vocabulary: int) -> None:
    ids = torch.randint(vocabulary, (2, 5), generator=torch.Generator().manual_seed(0))
    table, logits, upstream = noise(1, (vocabulary, 6)), noise(2, (10, vocabulary)) * 9, noise(3, (2, 5, 6))

    def rank_main(rank: int) -> None:
        init_mesh(make_settings(tp=tp), "cpu")
        own = slice(*chunk_range(vocabulary, tp, rank))
        rows = table[own].clone().requires_grad_()
        reference = table.clone().requires_grad_()
        out = c.all_reduce(embedding(ids, rows, vocabulary, "tp"), "tp")
        expected = F.embedding(ids, reference)
        torch.testing.assert_close(out, expected)
        out.backward(upstream)
        expected.backward(upstream)
        assert reference.grad is not None
        torch.testing.assert_close(rows.grad, reference.grad[own])
        for ignored in (slice(0, 0), slice(0, 4), slice(None)):
            target = ids.flatten().clone()
            target[ignored] = -100
            part, full = logits[:, own].clone().requires_grad_(), logits.clone().requires_grad_()
            loss = cross_entropy(part, target, vocabulary, "tp")
            expected = F.cross_entropy(full, target, reduction="sum")
            torch.testing.assert_close(loss, expected)
            (loss * 0.5).backward()
            (expected * 0.5).backward()
            assert full.grad is not None
            torch.testing.assert_close(part.grad, full.grad[:, own])

    run_ranks(tp, rank_main)
