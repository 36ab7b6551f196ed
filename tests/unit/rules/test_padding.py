"""Pads at the end of samples: what is allowed changes neither loss nor gradients; what might is refused by name.

Each model is typed, and run on samples as they are and on padded ones: the verdict of the type is held against numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.compiler import prepare
from autopar.errors import PlanError
from autopar.ir.graph import S, TensorInfo
from autopar.ir.padding import Padding
from autopar.rules.padding import padding_of
from autopar.runtime.padding import padded
from tests.distributed.handwritten import make_settings
from tests.passes.programs import read

D, WORDS, TOKENS, SEQUENCE = 8, 17, 5, 8


class Model(nn.Module):
    """`body` makes a loss of the embedded tokens x [b, s, d], the mask and the labels [b, s]."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body = body
        self.words, self.places = nn.Embedding(WORDS, D), nn.Embedding(SEQUENCE, D)
        self.norm, self.batch_norm, self.conv = nn.LayerNorm(D), nn.BatchNorm1d(D), nn.Conv1d(D, D, 3, padding=1)
        self.first, self.head = nn.Parameter(torch.randn(1, 1, D)), nn.Linear(D, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        return self.body(self, self.words(input_ids), attention_mask, labels)

    def ce(self, x: Tensor, labels: Tensor, **options: Any) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), **options)


def fused(x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    q = x[:, None]
    return x + F.scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=causal)[:, 0]


def written(x: Tensor, keep: Tensor, fill: float = float("-inf")) -> Tensor:
    scores = (x @ x.transpose(1, 2)).masked_fill(~keep, fill)
    return x + scores.softmax(-1) @ x


def keys(mask: Tensor) -> Tensor:
    return mask.bool()[:, None, None, :]


def places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)


def window(x: Tensor) -> Tensor:
    rows, columns = places(x)[:, None], places(x)[None, :]
    return (columns <= rows) & (columns > rows - 3)


def shift(labels: Tensor) -> Tensor:
    return F.pad(labels, (0, 1), value=-100)[:, 1:]


def mean_of(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)


def ones_and_others(m: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    weights = (labels != -100).to(x.dtype)
    terms = F.cross_entropy(m.head(x).transpose(1, 2), labels, reduction="none")
    return (terms * (1 + weights)).sum() / weights.sum()


ALLOWED: dict[str, Callable[..., Tensor]] = {
    "causal": lambda m, x, mask, labels: m.ce(fused(x, causal=True), labels),
    "a mask of truth values": lambda m, x, mask, labels: m.ce(fused(x, keys(mask)), labels),
    "a mask of −inf": lambda m, x, mask, labels: m.ce(
        fused(x, torch.zeros_like(keys(mask), dtype=x.dtype).masked_fill(~keys(mask), float("-inf"))), labels
    ),
    "a window by positions": lambda m, x, mask, labels: m.ce(fused(x, window(x)[None, None]), labels),
    "a mask of keys for each row": lambda m, x, mask, labels: m.ce(
        fused(x, keys(mask).expand(-1, 1, x.shape[1], -1) & (mask >= 0)[:, None, None, :]), labels
    ),
    "attention written out": lambda m, x, mask, labels: m.ce(
        written(x, places(x)[None, :] <= places(x)[:, None]), labels
    ),
    "a root mean square": lambda m, x, mask, labels: m.ce(
        x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), labels
    ),
    "attention written out with a mask": lambda m, x, mask, labels: m.ce(written(x, keys(mask)[:, 0]), labels),
    "attention under a triangle": lambda m, x, mask, labels: m.ce(
        written(x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()), labels
    ),
    "labels shifted by a pad": lambda m, x, mask, labels: m.ce(fused(x, causal=True), shift(labels)),
    "labels shifted by slices": lambda m, x, mask, labels: m.ce(fused(x, causal=True)[:, :-1], labels[:, 1:]),
    "sequence first": lambda m, x, mask, labels: m.ce(x.transpose(0, 1), labels.t()),
    "a class for each token": lambda m, x, mask, labels: F.cross_entropy(m.head(x).transpose(1, 2), labels),
    "terms and weights": ones_and_others,
    "learned positions": lambda m, x, mask, labels: m.ce(x + m.places(places(x)), labels),
    "positions of the mask": lambda m, x, mask, labels: m.ce(x + mask.cumsum(1).unsqueeze(-1) / 9, labels),
    "labels where the mask is": lambda m, x, mask, labels: m.ce(x, torch.where(mask.bool(), labels, -100)),
    "the mean of the mask's": lambda m, x, mask, labels: mean_of(m.norm(x), mask).square().mean(),
    "a regression of the mask's": lambda m, x, mask, labels: (x.square().sum(-1) * mask).sum() / mask.sum(),
    "the first token": lambda m, x, mask, labels: F.cross_entropy(m.head(fused(x, keys(mask))[:, 0]), labels[:, 0]),
    "a token before": lambda m, x, mask, labels: m.ce(
        fused(torch.cat([m.first.expand(x.shape[0], 1, D), x], 1), causal=True)[:, 1:], labels
    ),
}  # fmt: skip


def twice(x: Tensor, keep: Tensor) -> Tensor:
    return written(written(x, keep), keep)


NO_KEY, NO_POLE = "may hide every key from a pad", "may have no finite value or derivative at pads"
REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "attention to all": (lambda m, x, mask, labels: m.ce(fused(x), labels), "give the model an `attention_mask`"),
    "a mask of the rows": (
        lambda m, x, mask, labels: m.ce(fused(x, mask.bool()[:, None, :, None]), labels),
        "has a mask that is the same for all keys",
    ),
    "a mask for nothing": (
        lambda m, x, mask, labels: m.ce(fused(x, (keys(mask) | True)), labels),
        "has a mask that need not hide the pads",
    ),
    "a finite mask": (
        lambda m, x, mask, labels: m.ce(fused(x, (1 - keys(mask).to(x.dtype)) * -1e9), labels),
        r"has a mask of -1e\+09 at pads: a token that sees no key at all would see them",
    ),
    "a finite score": (
        lambda m, x, mask, labels: m.ce(written(x, keys(mask)[:, 0], -1e9), labels),
        "the scores of pads are not −inf",
    ),
    "the mean": (lambda m, x, mask, labels: x.mean(1).square().mean(), "mixes the tokens|sums over the tokens"),
    "the largest": (lambda m, x, mask, labels: x.amax(1).square().mean(), "mixes the tokens"),
    "the last token": (lambda m, x, mask, labels: x[:, -1].square().mean(), "reads the end of the sequence"),
    "the last tokens": (lambda m, x, mask, labels: x[:, -2:].square().mean(), "reads the end of the sequence"),
    "the mean over all": (
        lambda m, x, mask, labels: F.mse_loss(x.sum(-1), labels.to(x.dtype)),
        "sums over the tokens of a sequence, pads included: multiply its terms by a mask",
    ),
    "divided by all": (
        lambda m, x, mask, labels: (x.square().sum(-1) * mask).mean(),
        "reads the length of the sequence, pads included",
    ),
    "scaled by the length": (
        lambda m, x, mask, labels: m.ce(x / x.shape[1], labels),
        "reads the length of the sequence, pads included",
    ),
    "batch norm": (lambda m, x, mask, labels: m.ce(m.batch_norm(x.flatten(0, 1)).view(x.shape), labels), "mixes"),
    "a convolution": (lambda m, x, mask, labels: m.ce(m.conv(x.transpose(1, 2)).transpose(1, 2), labels), "mixes"),
    "a norm over tokens": (
        lambda m, x, mask, labels: m.ce(F.softmax(x, 1), labels), "mixes the tokens of a sequence",
    ),
    "reversed": (lambda m, x, mask, labels: m.ce(x.flip(1), labels.flip(1)), "mixes the tokens"),
    "counted from the end": (
        lambda m, x, mask, labels: m.ce(x + (x.shape[1] - places(x))[:, None], labels), "reads the length",
    ),
    "samples across tokens": (
        lambda m, x, mask, labels: m.ce(x, labels.t()), "pairs tokens that lie differently",
    ),
    "something after": (
        lambda m, x, mask, labels: m.ce(torch.cat([x, m.first.expand(x.shape[0], 1, D)], 1)[:, :-1], labels),
        "puts something after the last token",
    ),
    "ids for targets": (
        lambda m, x, mask, labels: m.ce(x[:, :-1], (labels * 0 + mask)[:, 1:]), "has targets at pads that it does not",
    ),
    "too short a table": (
        lambda m, x, mask, labels: m.ce(x + m.places(places(x) + 2), labels), "reads row 9 of a table that has 8",
    ),
    "a row that sees no key": (
        lambda m, x, mask, labels: m.ce(twice(x, mask.bool()[:, :, None] & mask.bool()[:, None, :]), labels), NO_KEY,
    ),
    "a row that sees no key, fused": (
        lambda m, x, mask, labels: m.ce(fused(x, (keys(mask) & mask.bool()[:, None, :, None])), labels), NO_KEY,
    ),
    "a window that sees no key": (
        lambda m, x, mask, labels: m.ce(twice(x, window(x) & keys(mask)[:, 0]), labels), NO_KEY,
    ),
    "a window and a mask": (
        lambda m, x, mask, labels: m.ce(fused(x, window(x)[None, None] & keys(mask)), labels), NO_KEY,
    ),
    "all classes hidden": (
        lambda m, x, mask, labels: m.ce(x.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).softmax(-1), labels),
        NO_KEY,
    ),
    "divided by the mask": (
        lambda m, x, mask, labels: m.ce(fused(x / mask.to(x.dtype).unsqueeze(-1), keys(mask)), labels), NO_POLE,
    ),
    "divided by its norm": (
        lambda m, x, mask, labels: m.ce(x / (x * mask.unsqueeze(-1)).norm(dim=-1, keepdim=True), labels), NO_POLE,
    ),
    "the root of the mask": (lambda m, x, mask, labels: ((x.sum(-1) * mask).square().sqrt() * mask).sum(), NO_POLE),
    "a logarithm": (lambda m, x, mask, labels: ((x.square() * mask.unsqueeze(-1)).log().sum(-1) * mask).sum(), NO_POLE),
    "a pad of the length": (
        lambda m, x, mask, labels: m.ce(F.pad(x, (0, 0, 0, 20 - x.shape[1]))[:, :5], labels[:, :5]),
        "reads the length of the sequence, pads included",
    ),
    "a triangle of the length": (
        lambda m, x, mask, labels: m.ce(written(x, (x @ x.transpose(1, 2)).tril(x.shape[1] - 1) > 0), labels),
        "reads the length of the sequence, pads included",
    ),
    "−inf times the mask": (
        lambda m, x, mask, labels: (torch.full_like(x, float("-inf")).sum(-1) * mask).sum(), "computes with ±inf",
    ),
    "a number for each token": (
        lambda m, x, mask, labels: torch.linalg.vector_norm(x, dim=(0, 1, 2)), "mixes the tokens of a sequence",
    ),
}  # fmt: skip


@cache
def batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(WORDS, (3, TOKENS), generator=generator) for _ in range(2))
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    labels[1, 1:3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def made(body: Callable[..., Tensor]) -> Model:
    torch.manual_seed(0)
    return Model(body).double()


def typed(model: nn.Module, precision: str = "fp64") -> tuple[Padding, ...]:
    inputs = {name: torch.zeros(2, 16, dtype=torch.long) for name in batch()}
    return padding_of(prepare(model, inputs, precision, "synchronise"), TOKENS, SEQUENCE)


def gradients(model: nn.Module, data: dict[str, Tensor]) -> list[Tensor]:
    loss = model(**data)
    used = [p for p in model.parameters() if p.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, used, materialize_grads=True, allow_unused=True)]


PADDING = (("input_ids", 1, 0), ("attention_mask", 1, 0), ("labels", 1, -100))


@pytest.mark.parametrize("body", ALLOWED.values(), ids=ALLOWED.keys())
def test_what_is_allowed_computes_the_same(body: Callable[..., Tensor]) -> None:
    model = made(body)
    rows = tuple((p.input, p.dim, p.value) for p in typed(model))
    assert {row[:2] for row in rows} == {row[:2] for row in PADDING} and set(rows) <= {*PADDING, ("labels", 1, 0)}
    longer = padded(batch(), make_settings(sequence=SEQUENCE, padded_from=TOKENS, padding=rows))
    assert longer["labels"].shape == (3, SEQUENCE)
    for with_pads, without in zip(gradients(model, longer), gradients(model, batch()), strict=True):
        torch.testing.assert_close(with_pads, without, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("body", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_might_not_is_refused_by_name(body: Callable[..., Tensor], message: str) -> None:
    with pytest.raises(PlanError, match=message) as refused:
        typed(made(body))
    said = str(refused.value)
    assert "samples of 5 tokens cannot be padded to 8" in said and "give samples of 8 tokens" in said


def test_a_refusal_names_the_op_and_the_users_line() -> None:
    with pytest.raises(
        PlanError, match=r"scaled_dot_product_attention of \w+\.root \(.*test_padding\.py:\d+\) attends"
    ):
        typed(made(REFUSED["attention to all"][0]))


# What is written in text, for no model that is traced has it.
SUM = "block model:\n  x: [b, s] = input x\n{}\n  y: [] = sum(z)\n  return y"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("  z: [b, s] = bernoulli(x)", "is an op of which no rule says whether it mixes tokens|at pads"),
        ("  z: [b, s, s] = cdist(x, x)", "of which no prefix|mixes|no rule"),
        ("  z: [b, s] = add(x, 1)", "sums over the tokens of a sequence, and at pads what it sums is not 0"),
    ],
)
def test_ops_in_text(lines: str, message: str) -> None:
    program = replace(read(SUM.format(lines)), inputs={"x": TensorInfo((S * 0 + 3, S), torch.float64)})
    with pytest.raises(PlanError, match=message):
        padding_of(program, TOKENS, SEQUENCE)


@pytest.mark.parametrize(("size", "message"), [(S + 1, r"input 'x' has a dim of s \+ 1"), (S * 0 + 3, "no input has")])
def test_inputs_are_sequences(size: Any, message: str) -> None:
    program = replace(read(SUM.format("  z: [b, s] = neg(x)")), inputs={"x": TensorInfo((size,), torch.float64)})
    with pytest.raises(PlanError, match=message):
        padding_of(program, TOKENS, SEQUENCE)
