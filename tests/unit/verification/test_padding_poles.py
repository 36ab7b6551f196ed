"""Models that have poles at pads, or read beyond their tables: each is run so, and refused before it could be."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.errors import PlanError
from autopar.runtime.data import padded
from tests.unit.verification.test_padding import (
    PADDING,
    SEQUENCE,
    TOKENS,
    D,
    Model,
    batch,
    compared,
    fused,
    gradients,
    made,
    places,
    written,
)

Body = Callable[[Model, Tensor, Tensor, Tensor], Tensor]


def causal(x: Tensor) -> Tensor:
    return places(x)[None, :] <= places(x)[:, None]


def kept(x: Tensor, mask: Tensor) -> Tensor:
    """Features that are 0 at pads."""
    return x * mask.unsqueeze(-1)


def counted(labels: Tensor) -> Tensor:
    """RoBERTa's positions: pads count where the id that stands for them is another."""
    return (labels != -5).long().cumsum(1)


def wrapped(x: Tensor) -> Tensor:
    """0, 1, … of the tokens, by bytes that end at 255."""
    return (places(x) + 256 - TOKENS).to(torch.uint8).long() - (256 - TOKENS)


def biased(m: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """A bias with a pole where a pad meets itself."""
    bias = 1 / (2 * SEQUENCE - 2 - places(x)[:, None] - places(x)[None, :])
    scores = (x @ x.transpose(1, 2) + bias).masked_fill(~causal(x), -inf)
    return m.ce(x + scores.softmax(-1) @ x, labels)


def hidden_class(m: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """No real token is of class 0, whose probability is 0, but pads are."""
    hide = F.pad(torch.full((1,), -inf, dtype=x.dtype, device=x.device), (0, D - 1))
    terms = (x + hide).log_softmax(-1).gather(-1, mask.unsqueeze(-1)).squeeze(-1)
    return (terms * mask).sum()


def far(x: Tensor) -> Tensor:
    """Pads, by their positions."""
    return places(x) >= TOKENS


def both_far(x: Tensor) -> Tensor:
    return far(x)[:, None] & far(x)[None, :]


def undecided(m: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """−inf and +inf at pads, which is neither."""
    zeros, pads = torch.zeros_like(x @ x.transpose(1, 2)), (mask == 0)[:, None, :]
    return m.ce(fused(x, (zeros.masked_fill(pads, inf) + zeros.masked_fill(pads, -inf))[:, None]), labels)


def seen_by_pads(m: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """+inf only where two pads meet."""
    hidden = torch.zeros_like(x @ x.transpose(1, 2)).masked_fill(far(x)[None, None, :], -inf)
    return m.ce(fused(x, hidden.masked_fill(both_far(x)[None], inf)[:, None]), labels)


def of_pairs(m: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Over features, which are all hidden where two pads meet."""
    pairs = (x[:, :, None, :] + x[:, None, :, :]).masked_fill(both_far(x)[None, :, :, None], -inf)
    return m.ce(x + (pairs.softmax(-1) * mask[:, None, :, None]).sum(2), labels)


def targets_of_pairs(m: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Ignored where a token meets a pad, not where two pads do."""
    rows, columns = far(x)[:, None], far(x)[None, :]
    targets = torch.where(rows, torch.where(columns, 1, -100), torch.where(columns, -100, 2))
    logits = (x[:, :, None, :] * x[:, None, :, :]).permute(0, 3, 1, 2)
    return F.cross_entropy(logits, targets[None].expand(x.shape[0], -1, -1), reduction="sum")


def exponent(m: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """0 at pads, where its derivative is a logarithm of −1."""
    base = torch.where(mask.bool().unsqueeze(-1), x.abs() + 1, -1.0)
    return m.ce(base.pow(m.first * mask.unsqueeze(-1)), labels)


NAN, INFINITE, ROWS = "is nan there", "is infinite there", "cannot be computed"
HOLES: dict[str, tuple[Body, str]] = {
    "layer norm without eps": (
        lambda m, x, mask, labels: m.ce(F.layer_norm(kept(x, mask), (D,), eps=0), labels), NAN,
    ),
    "rms norm without eps": (
        lambda m, x, mask, labels: m.ce(F.rms_norm(kept(x, mask), (D,), eps=0), labels), NAN,
    ),
    "a power of what is negative at pads": (
        lambda m, x, mask, labels: m.ce(torch.where(mask.bool().unsqueeze(-1), x.abs() + 1, -1.0).pow(2.5), labels),
        NAN,
    ),
    "an exponential of positions": (
        lambda m, x, mask, labels: ((places(x).to(x.dtype) * 150).exp() / 1e280 * x.sum(-1) * mask).sum(), INFINITE,
    ),
    "a pole between two pads": (biased, NAN),
    "positions that count pads": (lambda m, x, mask, labels: m.ce(x + m.places(counted(labels)), labels), ROWS),
    "a table by such positions": (
        lambda m, x, mask, labels: m.ce(x + m.places.weight[counted(labels)], labels), ROWS,
    ),
    "rows of a table": (
        lambda m, x, mask, labels: m.ce(x + m.places.weight.index_select(0, places(x) + 2), labels), ROWS,
    ),
    "positions from 2": (
        lambda m, x, mask, labels: m.ce(x + m.places(torch.arange(2, x.shape[1] + 2, device=x.device)), labels), ROWS,
    ),
    "positions in bytes": (lambda m, x, mask, labels: m.ce(x + m.places(wrapped(x)), labels), ROWS),
    "a class that is hidden": (hidden_class, "gather of .* is infinite"),
    "rows that see no key": (
        lambda m, x, mask, labels: m.ce(written(x, causal(x) & mask.bool()[:, :, None]), labels), NAN,
    ),
    "−inf and +inf": (undecided, NAN),
    "+inf where two pads meet": (seen_by_pads, NAN),
    "nothing where two pads meet": (of_pairs, NAN),
    "targets of pairs": (targets_of_pairs, "cross_entropy_loss of"),
    "a large power": (
        lambda m, x, mask, labels: m.ce(x + places(x).to(x.dtype)[:, None].pow(400) / 1e240, labels), INFINITE,
    ),
    "a power by parameters": (exponent, "the gradient of first: pow of"),
}  # fmt: skip


def whole() -> dict[str, Tensor]:
    """Samples all of whose tokens are there."""
    return {**batch(), "attention_mask": torch.ones_like(batch()["labels"])}


@pytest.mark.parametrize(("body", "message"), HOLES.values(), ids=HOLES.keys())
def test_what_would_be_wrong_is_refused(body: Body, message: str) -> None:
    model = made(body)
    right = gradients(model, whole())
    assert all(g.isfinite().all() for g in right)
    longer = padded(whole(), PADDING, SEQUENCE)
    try:
        found = gradients(model, longer)
    except (IndexError, RuntimeError) as error:
        assert "out of" in str(error) or "index" in str(error)
    else:
        assert not all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(found, right, strict=True))
    with pytest.raises(PlanError, match=message):
        compared(model)


def test_numbers_are_rounded_as_operands_are() -> None:
    """In fp32 what is clamped to 0.7 is not less than 0.7."""

    def body(m: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        few = torch.where(x.clamp(max=0.7) < 0.7, 0.0, 1.0)
        return (few * (x - 3).square()).sum()

    with pytest.raises(PlanError, match="sum of"):
        compared(made(body).float(), "fp32")


@pytest.mark.parametrize("epsilon", [1e-50, 1e-36])
def test_an_epsilon_is_one_of_the_runs_precision(epsilon: float) -> None:
    """In fp32 the first is 0, and of the second the derivative overflows."""

    def body(m: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return m.ce(x * torch.rsqrt(kept(x, mask).pow(2).mean(-1, keepdim=True) + epsilon), labels)

    model = made(body).float()
    longer = padded(whole(), PADDING, SEQUENCE)
    assert all(g.isfinite().all() for g in gradients(model, whole()))
    assert not all(g.isfinite().all() for g in gradients(model, longer))
    with pytest.raises(PlanError, match="rsqrt of"):
        compared(model, "fp32")
    compared(made(body).double())
