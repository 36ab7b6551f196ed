"""Pads at the end of samples: a model in which they count is refused by its op, and any other is planned.

What is planned is run again on samples that the check has not drawn, as they are and padded.
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

from autopar.compile.compiler import prepare
from autopar.errors import PlanError
from autopar.ir.graph import S, TensorInfo
from autopar.ir.lengths import Padding
from autopar.rules.padding import paddings_of
from autopar.runtime.data import padded
from autopar.verification.padding import compare_with_pads
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


def chosen(x: Tensor) -> Tensor:
    """Weights of the two largest features, which sum to 1, as a router of experts has them."""
    values, index = x.softmax(-1).topk(2, -1)
    return torch.zeros_like(x).scatter(-1, index, values / values.sum(-1, keepdim=True))


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


ATTENTION, NAN = "scaled_dot_product_attention of", "is nan there"
REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "attention to all": (lambda m, x, mask, labels: m.ce(fused(x), labels), ATTENTION),
    "a mask of the rows": (lambda m, x, mask, labels: m.ce(fused(x, mask.bool()[:, None, :, None]), labels), ATTENTION),
    "a mask for nothing": (lambda m, x, mask, labels: m.ce(fused(x, (keys(mask) | True)), labels), ATTENTION),
    "a mask that is weak": (lambda m, x, mask, labels: m.ce(written(x, keys(mask)[:, 0], -9.0), labels), "softmax of"),
    "the mean": (lambda m, x, mask, labels: x.mean(1).square().mean(), "mean of"),
    "the largest": (lambda m, x, mask, labels: x.amax(1).square().mean(), "amax of"),
    "the last token": (lambda m, x, mask, labels: x[:, -1].square().mean(), "select of"),
    "the last tokens": (lambda m, x, mask, labels: x[:, -2:].square().mean(), "slice of"),
    "the mean over all": (lambda m, x, mask, labels: F.mse_loss(x.sum(-1), labels.to(x.dtype)), "mse_loss of"),
    "divided by all": (lambda m, x, mask, labels: (x.square().sum(-1) * mask).mean(), "(sum|mean|div) of"),
    "scaled by the length": (lambda m, x, mask, labels: m.ce(x / x.shape[1], labels), "div of"),
    "batch norm": (
        lambda m, x, mask, labels: m.ce(m.batch_norm(x.flatten(0, 1)).view(x.shape), labels), "batch_norm of",
    ),
    "an instance norm": (
        lambda m, x, mask, labels: m.ce(F.instance_norm(x.transpose(1, 2)).transpose(1, 2), labels), "instance_norm of",
    ),
    "a convolution": (
        lambda m, x, mask, labels: m.ce(m.conv(x.transpose(1, 2) + 1).transpose(1, 2), labels), "conv1d of",
    ),
    "a norm over tokens": (lambda m, x, mask, labels: m.ce(F.softmax(x, 1), labels), "softmax of"),
    "reversed": (lambda m, x, mask, labels: m.ce(x.flip(1), labels.flip(1)), "(sum|flip) of"),
    "counted from the end": (
        lambda m, x, mask, labels: m.ce(x + (x.shape[1] - places(x))[:, None], labels), "rsub of",
    ),
    "samples across tokens": (lambda m, x, mask, labels: m.ce(x, labels.t()), "cross_entropy_loss of"),
    "something after": (
        lambda m, x, mask, labels: m.ce(torch.cat([x, m.first.expand(x.shape[0], 1, D)], 1)[:, 1:], labels), "cat of",
    ),
    "ids for targets": (lambda m, x, mask, labels: m.ce(x[:, :-1], (labels * 0 + mask)[:, 1:]), "sum of"),
    "a count of the ids": (
        lambda m, x, mask, labels: F.cross_entropy(m.head(x[:, 0]), labels[:, 0]) * (labels != 3).sum() / 9, "sum of",
    ),
    "a balance of classes": (
        lambda m, x, mask, labels: m.ce(x, labels) + m.head(x).softmax(-1).mean((0, 1)).square().sum(),
        "(mean|sum|div) of",
    ),
    "a row of pads that is trained": (
        lambda m, x, mask, labels: m.ce(x, labels) + (x - x.detach()).sum(),
        "the gradient of words.weight: embedding of",
    ),
    "too short a table": (
        lambda m, x, mask, labels: m.ce(x + m.places(places(x) + 2), labels), "cannot be computed: embedding of",
    ),
    "a row that sees no key": (
        lambda m, x, mask, labels: m.ce(twice(x, mask.bool()[:, :, None] & mask.bool()[:, None, :]), labels), NAN,
    ),
    "a window that sees no key": (
        lambda m, x, mask, labels: m.ce(twice(x, window(x) & keys(mask)[:, 0]), labels), NAN,
    ),
    "all classes hidden": (
        lambda m, x, mask, labels: m.ce(x.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).softmax(-1), labels),
        NAN,
    ),
    "divided by the mask": (
        lambda m, x, mask, labels: m.ce(fused(x / mask.to(x.dtype).unsqueeze(-1), keys(mask)), labels),
        "div of .* is infinite there",
    ),
    "divided by its norm": (
        lambda m, x, mask, labels: m.ce(x / (x * mask.unsqueeze(-1)).norm(dim=-1, keepdim=True), labels),
        "div of .* is infinite there",
    ),
    "the root of the mask": (
        lambda m, x, mask, labels: ((x.sum(-1) * mask).square().sqrt() * mask).sum(), "the gradient of .*: sqrt of",
    ),
    "a logarithm": (
        lambda m, x, mask, labels: ((x.square() * mask.unsqueeze(-1)).log().sum(-1) * mask).sum(),
        "log of .* is infinite there",
    ),
    "a triangle of the length": (
        lambda m, x, mask, labels: m.ce(written(x, (x @ x.transpose(1, 2)).tril(x.shape[1] - 1) > 0), labels),
        "softmax of",
    ),
    "a number for each token": (
        lambda m, x, mask, labels: torch.linalg.vector_norm(x, dim=(0, 1, 2)), "linalg_vector_norm of",
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


def compared(model: nn.Module, precision: str = "fp64") -> tuple[Padding, ...]:
    """How the inputs are padded. PlanError where pads count."""
    inputs = {name: torch.zeros(2, 16, dtype=torch.long) for name in batch()}
    program = prepare(model, inputs, precision, "synchronise")
    compare_with_pads(program, dict(model.named_buffers()), TOKENS, SEQUENCE)
    return paddings_of(program)


def gradients(model: nn.Module, data: dict[str, Tensor]) -> list[Tensor]:
    loss = model(**data)
    used = [p for p in model.parameters() if p.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, used, materialize_grads=True, allow_unused=True)]


PADDING = (("input_ids", 1, 0), ("attention_mask", 1, 0), ("labels", 1, -100))


@pytest.mark.parametrize("body", ALLOWED.values(), ids=ALLOWED.keys())
def test_what_is_allowed_computes_the_same(body: Callable[..., Tensor]) -> None:
    model, state = made(body), torch.random.get_rng_state()
    rows = tuple((p.input, p.dim, p.value) for p in compared(model))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {row[:2] for row in rows} == {row[:2] for row in PADDING} and set(rows) <= {*PADDING, ("labels", 1, 0)}
    longer = padded(batch(), rows, SEQUENCE)
    assert longer["labels"].shape == (3, SEQUENCE)
    for with_pads, without in zip(gradients(model, longer), gradients(model, batch()), strict=True):
        torch.testing.assert_close(with_pads, without, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("body", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_counts_pads_is_refused_by_its_op(body: Callable[..., Tensor], message: str) -> None:
    with pytest.raises(PlanError, match=message) as refused:
        compared(made(body))
    said = str(refused.value)
    assert "samples of 5 tokens cannot be padded to 8: pads " in said and "give samples of 8 tokens" in said
    assert "test_padding.py:" in said


def test_ops_that_draw_and_losses_that_are_no_number_show_nothing() -> None:
    with pytest.raises(PlanError, match=r"rand_like of .*test_padding.py:\d+\) draws random numbers"):
        compared(made(lambda m, x, mask, labels: m.ce(x + torch.rand_like(x), labels)))
    with pytest.raises(PlanError, match="for drawn values the model's loss or its gradients are not finite"):
        compared(made(lambda m, x, mask, labels: (torch.full_like(x, float("-inf")).sum(-1) * mask).sum()))


def test_the_true_length_is_run_too() -> None:
    model = made(lambda m, x, mask, labels: m.ce(x, labels) + (places(x) >= 61).sum())
    inputs = {name: torch.zeros(2, 16, dtype=torch.long) for name in batch()}
    program = prepare(model, inputs, "fp64")
    compare_with_pads(program, {}, 51, 54)
    with pytest.raises(PlanError, match="61 tokens cannot be padded to 64: pads change the loss at this length, from"):
        compare_with_pads(program, {}, 61, 64)


SUM = "block model:\n  x: [b, s] = input x\n  z: [b, s] = neg(x)\n  y: [] = sum(z)\n  return y"


@pytest.mark.parametrize(("size", "message"), [(S + 1, r"input 'x' has a dim of s \+ 1"), (S * 0 + 3, "no input has")])
def test_inputs_are_sequences(size: Any, message: str) -> None:
    program = replace(read(SUM), inputs={"x": TensorInfo((size,), torch.float64)})
    with pytest.raises(PlanError, match=message):
        paddings_of(program)
