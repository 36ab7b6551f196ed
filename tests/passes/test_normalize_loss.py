"""normalize_loss: a mean is a sum over the global count of targets."""

import pytest
import torch
from torch import Tensor, nn

from autopar.compile.compiler import prepare
from autopar.ir.graph import Program, Role, info
from autopar.ir.text import block_text, program_text
from autopar.passes.normalize_loss import NormalizeLoss
from tests.interpreter import run_program
from tests.passes.programs import assert_becomes, read

LOSS = """
block model:
  x: [b, 8] = input x
  labels: [b] int = input labels
  w: [5, 8] = parameter w
  logits: [b, 5] = linear(x, w)
  loss: [] = cross_entropy_loss({arguments})
  return loss
"""


def test_a_mean_becomes_a_sum_over_the_count() -> None:
    assert_becomes(
        NormalizeLoss(),
        LOSS.format(arguments="logits, labels"),
        """
        block model:
          x: [b, 8] = input x
          labels: [b] = input labels
          w: [5, 8] = parameter w
          _count: [] = buffer _count
          logits: [b, 5] = linear(x, w)
          cross_entropy_loss_default: [] = cross_entropy_loss(logits, labels, None, 2)
          div_tensor: [] = div(cross_entropy_loss_default, _count)
          return div_tensor

        block count:
          labels: [b] = input labels
          ne_scalar: [b] = ne(labels, -100)
          sum_default: [] = sum(ne_scalar)
          return sum_default
        """,
    )


def test_targets_are_counted_after_what_the_model_does_to_its_labels() -> None:
    """N1: Hugging Face shifts the labels, and pads the last with the ignored index."""
    after = NormalizeLoss().apply(
        read(
            """
            block model:
              x: [b, s, 8] = input x
              labels: [b, s] int = input labels
              w: [5, 8] = parameter w
              logits: [b, s, 5] = linear(x, w)
              padded: [b, s + 1] int = pad(labels, [0, 1], "constant", 0)
              shifted: [b, s] int = slice(padded, 1, 1, 9223372036854775807)
              flat: [b*s] int = reshape(shifted, [b*s])
              rows: [b*s, 5] = reshape(logits, [b*s, 5])
              loss: [] = cross_entropy_loss(rows, flat, None, 1, 0)
              return loss
            """
        ),
        None,
    )
    count = after.blocks["count"]
    assert [n.name for n in count.nodes] == ["labels", "padded", "shifted", "flat", "ne_scalar", "sum_default"]
    assert count.nodes[-2].args[1] == 0, "the model's ignored index"


def after(text: str) -> Program:
    return NormalizeLoss().apply(read(text), None)


def test_two_losses_share_the_count_of_their_targets() -> None:
    two = LOSS.format(arguments="logits, labels").replace(
        "return loss", "more: [] = cross_entropy_loss(logits, labels)\n  total: [] = add(loss, more)\n  return total"
    )
    program = after(two)
    assert [info(n).ref for n in program.blocks["model"].placeholders(Role.BUFFER)] == ["_count"]
    assert len(program.blocks["count"].results) == 1


@pytest.mark.parametrize("reduction", [0, 2])
def test_a_sum_is_left_as_it_is(reduction: int) -> None:
    text = LOSS.format(arguments=f"logits, labels, None, {reduction}")
    assert program_text(after(text)) == program_text(read(text))
    assert "count" not in after(text).blocks, "nothing is counted"


def test_class_weights_are_summed_by_how_often_each_class_occurs() -> None:
    """The weights stay in the model; what is counted depends on the labels alone."""
    text = LOSS.replace("logits:", "weight: [5] = buffer weight\n  logits:").format(arguments="logits, labels, weight")
    program = after(text)
    assert block_text(program.blocks["model"]).splitlines()[-6:] == [
        "  logits: [b, 5] = linear(x, w)",
        "  mul_tensor_1: [5] = mul(weight, _count)",
        "  sum_default: [] = sum(mul_tensor_1)",
        "  cross_entropy_loss_default: [] = cross_entropy_loss(logits, labels, weight, 2)",
        "  div_tensor: [] = div(cross_entropy_loss_default, sum_default)",
        "  return div_tensor",
    ]
    assert [info(n).ref for n in program.blocks["count"].placeholders()] == ["labels"]
    assert info(program.blocks["count"].results[0]).shape == (5,)


REGRESSION = """
block model:
  x: [b, s, 8] = input x
  t: [b, s, 5] = input t
  w: [5, 8] = parameter w
  y: [b, s, 5] = linear(x, w)
  {lines}
  return loss
"""


@pytest.mark.parametrize(
    ("lines", "expected", "count"),
    [
        (
            "loss: [] = mse_loss(y, t)",
            ["mse_loss_default: [] = mse_loss(y, t, 2)", "div_tensor: [] = div(mse_loss_default, _count)"],
            "new_full_default: [] = new_full(x, [], 5*b*s, dtype=torch.int64)",
        ),
        (
            "loss: [] = mean.default(y)",
            ["sum_default: [] = sum(y)", "div_tensor: [] = div(sum_default, _count)"],
            "new_full_default: [] = new_full(x, [], 5*b*s, dtype=torch.int64)",
        ),
        (
            "loss: [5] = mean(y, [0, 1])",
            ["sum_dim_int_list: [5] = sum(y, [0, 1])", "div_tensor: [5] = div(sum_dim_int_list, _count)"],
            "new_full_default: [] = new_full(x, [], b*s, dtype=torch.int64)",
        ),
        (
            "total: [] = sum(y)\n  loss: [] = div(total, b)",
            ["total: [] = sum(y)", "loss: [] = div(total, _count)"],
            "new_full_default: [] = new_full(x, [], b, dtype=torch.int64)",
        ),
        (
            "total: [] = sum(y)\n  n: [] = sum(t)\n  m: [] = clamp(n, 1)\n  loss: [] = div(total, m)",
            ["total: [] = sum(y)", "m: [] = clamp(_count, 1)", "loss: [] = div(total, m)"],
            "n: [] = sum(t)",
        ),
    ],
)
def test_means_over_the_batch(lines: str, expected: list[str], count: str) -> None:
    program = after(REGRESSION.format(lines=lines))
    shown = [line.strip() for line in block_text(program.blocks["model"]).splitlines()]
    assert shown[shown.index("y: [b, s, 5] = linear(x, w)") + 1 : -1] == expected
    assert block_text(program.blocks["count"]).splitlines()[-2].strip() == count


@pytest.mark.parametrize(
    "lines",
    [
        "loss: [b, s] = mean(y, [-1])",  # per sample
        "noisy: [b, s, 5] = dropout(t, 0.5, True)\n  n: [] = sum(noisy)\n  loss: [] = div(n, 3)",  # drawn anew
        "n: [] = sum(y)\n  loss: [] = clamp(n, 1)",  # of parameters
        "total: [] = sum(y)\n  loss: [] = div(total, b*b)",  # no sum over parts of a batch
    ],
)
def test_nothing_else_is_counted(lines: str) -> None:
    program = after(REGRESSION.format(lines=lines))
    assert "_count" not in program_text(program) and "count" not in program.blocks


def test_targets_of_parameters_are_counted_where_they_are() -> None:
    """Pseudo-labels: nothing knows how many there are before the forward."""
    program = after(
        """
        block model:
          x: [b, 5] = input x
          w: [5, 5] = parameter w
          logits: [b, 5] = linear(x, w)
          teacher: [b] int = argmax(logits, -1)
          loss: [] = cross_entropy_loss(logits, teacher)
          return loss
        """
    )
    assert "count" not in program.blocks
    assert "sum(ne_scalar)" in block_text(program.blocks["model"])


class Doubled(nn.Module):
    """One less twice a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.linear(x).square().mean()
        return torch.rsub(mean, torch.ones((), dtype=mean.dtype, device=mean.device), alpha=2)


def test_a_reversed_difference_keeps_its_factor() -> None:
    model, inputs = Doubled().double(), {"x": torch.randn(3, 8, dtype=torch.float64)}
    torch.testing.assert_close(run_program(prepare(model, inputs, "fp64"), model, inputs), model(**inputs))
