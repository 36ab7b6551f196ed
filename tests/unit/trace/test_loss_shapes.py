"""Models of one layer and a loss: what the prepared program computes is what they compute."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.compile.compiler import prepare
from tests.interpreter import run_program

Loss = Callable[[Tensor, Tensor], Tensor]


class _Model(nn.Module):
    def __init__(self, loss: Loss, features: int) -> None:
        super().__init__()
        self.head, self.loss = nn.Linear(6, features), loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(x), labels)


def _agrees(loss: Loss, x: Tensor, labels: Tensor, features: int = 5) -> None:
    model, inputs = _Model(loss, features).double(), {"x": x, "labels": labels}
    torch.testing.assert_close(run_program(prepare(model, inputs, "fp64"), model, inputs), model(**inputs))


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, t: F.cross_entropy(y, t, reduction="none").mean(),
        lambda y, t: (F.cross_entropy(y, t, reduction="none") * (t > 1)).sum() / (t > 1).sum(),
        lambda y, t: nn.NLLLoss(reduction="none")(F.log_softmax(y, -1), t).view(-1, 1).square().mean(),
        lambda y, t: F.multi_margin_loss(y, t),  # a mean over rows, by an op without a rule
    ],
)
def test_a_loss_for_each_row(loss: Loss) -> None:
    _agrees(loss, torch.randn(4, 6, dtype=torch.float64), torch.tensor([1, 4, 2, 0]))


def test_a_loss_for_each_token() -> None:
    def loss(y: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="none").view(t.shape).square().mean()

    _agrees(loss, torch.randn(4, 3, 6, dtype=torch.float64), torch.randint(5, (4, 3)))


def test_one_sample_keeps_its_dim_where_the_author_squeezes() -> None:
    def loss(y: Tensor, t: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(y.squeeze(), t)

    model, t = _Model(loss, 1).double(), torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    x = torch.randn(3, 6, dtype=torch.float64)
    program = prepare(model, {"x": x, "labels": t}, "fp64")
    one = F.binary_cross_entropy_with_logits(model.head(x[:1]).squeeze(-1), t[:1])
    torch.testing.assert_close(run_program(program, model, {"x": x[:1], "labels": t[:1]}), one)


def test_what_forward_counts_first() -> None:
    class Standardised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(x - x.mean(0)).square().mean()
            return result

    model, inputs = Standardised().double(), {"x": torch.randn(4, 6, dtype=torch.float64)}
    torch.testing.assert_close(run_program(prepare(model, inputs, "fp64"), model, inputs), model(**inputs))
