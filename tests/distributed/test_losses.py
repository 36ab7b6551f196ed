"""Losses of any kind: what is summed, counted and shared so that parts of a batch add up to the whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import zoo
from tests.distributed.programs import Subject, assert_parity, subject
from tests.models import layered

SAMPLES, LENGTH, WIDTH, CLASSES = 12, 6, 8, 5
Loss = Callable[["Regressor", Tensor, Tensor, Tensor], Tensor]


class Regressor(nn.Module):
    """Two layers, then a loss of predictions [b, s, classes] with scores [b, s, classes] and labels [b, s]."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.weight: Tensor
        self.register_buffer("weight", torch.linspace(0.2, 1.7, CLASSES))

    def forward(self, x: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.loss(self, self.head(x), scores, labels)


def _rows(y: Tensor) -> Tensor:
    return y.flatten(0, 1)


def _masked_mean(m: Regressor, y: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    mask = (labels >= 0).to(y.dtype)
    return ((y - t).pow(2).sum(-1) * mask).sum() / mask.sum().clamp(min=1)


def _each_sample(m: Regressor, y: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    """The mean over samples of each sample's masked mean, as in fine-tuning code."""
    mask = (labels >= 0).to(y.dtype)
    terms = (y - t).abs().sum(-1) * mask
    return (terms.sum(1) / (mask.sum(1) + 1)).mean()


def _standardised(m: Regressor, y: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    """Targets centred on their mean over the batch: a number of the inputs."""
    return F.mse_loss(y, t - t.mean((0, 1)))


def _images(m: Regressor, y: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy over dim 1 of [n, C, d]."""
    return F.cross_entropy(y.transpose(1, 2), labels, weight=m.weight)


FREE: dict[str, Loss] = {
    "mse": lambda m, y, t, labels: F.mse_loss(y, t),
    "l1": lambda m, y, t, labels: F.l1_loss(y, t),
    "smooth_l1": lambda m, y, t, labels: F.smooth_l1_loss(y, t, beta=0.3),
    "huber": lambda m, y, t, labels: F.huber_loss(y, t, delta=0.7),
    "bce": lambda m, y, t, labels: F.binary_cross_entropy(y.sigmoid(), t.sigmoid()),
    "bce_with_logits": lambda m, y, t, labels: F.binary_cross_entropy_with_logits(
        y, t.sigmoid(), weight=t.abs(), pos_weight=m.weight
    ),
    "kl_div_mean": lambda m, y, t, labels: F.kl_div(y.log_softmax(-1), t.softmax(-1)),
    "kl_div_batchmean": lambda m, y, t, labels: F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
    "soft_margin": lambda m, y, t, labels: F.soft_margin_loss(y, t.sign()),
    "triplet": lambda m, y, t, labels: F.triplet_margin_loss(y, t, t.flip(-1)),
    "poisson": lambda m, y, t, labels: F.poisson_nll_loss(y, t.exp()),
    "cosine": lambda m, y, t, labels: (1 - F.cosine_similarity(y, t, dim=-1)).mean(),
    "cosine_embedding": lambda m, y, t, labels: F.cosine_embedding_loss(_rows(y), _rows(t), _rows(labels).sign()),
    "nll": lambda m, y, t, labels: F.nll_loss(_rows(y).log_softmax(-1), _rows(labels), ignore_index=-100),
    "nll_weighted": lambda m, y, t, labels: F.nll_loss(_rows(y).log_softmax(-1), _rows(labels), m.weight),
    "cross_entropy_weighted": lambda m, y, t, labels: F.cross_entropy(_rows(y), _rows(labels), m.weight),
    "cross_entropy_smoothed": lambda m, y, t, labels: F.cross_entropy(_rows(y), _rows(labels), label_smoothing=0.1),
    "cross_entropy_both": lambda m, y, t, labels: F.cross_entropy(
        _rows(y), _rows(labels).clamp(min=0), m.weight, ignore_index=2, label_smoothing=0.1
    ),
    "cross_entropy_images": _images,
    "cross_entropy_probabilities": lambda m, y, t, labels: F.cross_entropy(_rows(y), _rows(t).softmax(-1), m.weight),
    "two_losses": lambda m, y, t, labels: F.cross_entropy(_rows(y), _rows(labels)) + 0.3 * F.mse_loss(y, t) + y.mean(),
    "mean_of_dims": lambda m, y, t, labels: (y - t).pow(2).mean((0, 1)).sum(),
    "mean_kept": lambda m, y, t, labels: (y - t).pow(2).mean(0, keepdim=True).sum(),
    "by_batch_size": lambda m, y, t, labels: (y - t).pow(2).sum() / y.shape[0],
    "by_size": lambda m, y, t, labels: (y - t).pow(2).sum() / (y.shape[0] * y.shape[1]),
    "sum": lambda m, y, t, labels: F.mse_loss(y, t, reduction="sum"),
    "masked_mean": _masked_mean,
    "each_sample": _each_sample,
    "standardised": _standardised,
}


def _balance(m: Regressor, y: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    """The product of two means over tokens, as the load-balancing loss of mixtures of experts."""
    share = F.one_hot(y.argmax(-1), CLASSES).to(y.dtype).mean((0, 1))
    return F.mse_loss(y, t) + 0.5 * (share * y.softmax(-1).mean((0, 1))).sum()


def _contrast_of_means(m: Regressor, y: Tensor, t: Tensor, labels: Tensor) -> Tensor:
    """A number of the whole batch that goes back into work on each sample."""
    return (y - t - y.mean((0, 1)).tanh()).pow(2).mean()


REDUCED: dict[str, Loss] = {
    "balance": _balance,
    "root": lambda m, y, t, labels: F.mse_loss(y, t).sqrt(),
    "of_means": _contrast_of_means,
    "constant": lambda m, y, t, labels: F.mse_loss(y, t) + 1.0,
    "weight_decay": lambda m, y, t, labels: F.mse_loss(y, t) + 0.1 * m.head.weight.pow(2).sum(),
    "log_of_sums": lambda m, y, t, labels: ((y - t).pow(2).sum() / y.pow(2).sum()).log(),
}


def _data() -> tuple[dict[str, Tensor], ...]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(5):
        x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
        scores = torch.randn(SAMPLES, LENGTH, CLASSES, generator=generator, dtype=torch.float64)
        labels = torch.randint(CLASSES, (SAMPLES, LENGTH), generator=generator)
        labels[torch.rand(SAMPLES, LENGTH, generator=generator) < torch.arange(SAMPLES).unsqueeze(1) / SAMPLES] = -100
        made.append({"x": x, "scores": scores, "labels": labels})
    return tuple(made)


@cache
def _subject(name: str) -> Subject:
    data = _data()
    model = Regressor({**FREE, **REDUCED}[name])
    program = layered(model.double(), {k: v[:2] for k, v in data[0].items()}, torch.float64)
    return subject(model, torch.float64, program, data=data)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", FREE)
def test_any_layout_of_samples(name: str) -> None:
    """Two replicas, each with three micro-batches of other numbers of targets."""
    made = _subject(name)
    assert_parity(made, made.plan(dp=2, micro_batch=2))


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("name", REDUCED)
def test_numbers_of_the_whole_batch_are_reduced_over_replicas(name: str) -> None:
    made = _subject(name)
    assert_parity(made, made.plan(dp=2, micro_batch=6))


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    "layout", [{"dp": 2, "micro_batch": 6}, {"dp": 2, "tp": 2, "pp": 2, "micro_batch": 6, "schedule": "gpipe"}]
)
def test_load_balancing_of_a_mixture_of_experts(layout: dict[str, Any]) -> None:
    """Mixtral with output_router_logits: the same auxiliary loss under every layout with one micro-batch."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    variant = zoo.VARIANTS["mixtral_aux:sdpa"]
    data = [variant.inputs(12, generator) for _ in range(5)]
    model = variant.build().double()
    program = layered(model, {**{k: v[:2] for k, v in data[0].items()}, **variant.arguments}, torch.float64)
    made = subject(model, torch.float64, program, data=data)
    assert_parity(made, made.plan(**layout))
