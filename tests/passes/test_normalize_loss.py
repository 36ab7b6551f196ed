"""normalize_loss: a mean is a sum over the global count of targets."""

import pytest

from autopar.errors import TraceError
from autopar.passes.normalize_loss import NormalizeLoss
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
          cross_entropy_loss_default: [] = cross_entropy_loss(logits, labels, None, 2, -100)
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


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("logits, labels, None, 2", "one mean cross-entropy loss is supported, found none"),
        ("logits, labels, w", "class weights and label smoothing"),
        ("logits, labels, None, 1, -100, 0.1", "class weights and label smoothing"),
    ],
)
def test_other_losses_are_refused(arguments: str, match: str) -> None:
    with pytest.raises(TraceError, match=match):
        NormalizeLoss().apply(read(LOSS.format(arguments=arguments)), None)


def test_two_losses_are_refused() -> None:
    two = LOSS.format(arguments="logits, labels").replace(
        "return loss", "more: [] = cross_entropy_loss(logits, labels)\n  total: [] = add(loss, more)\n  return total"
    )
    with pytest.raises(TraceError, match=r"found aten\.cross_entropy_loss.*, aten\.cross_entropy_loss"):
        NormalizeLoss().apply(read(two), None)


def test_targets_that_depend_on_parameters_are_refused() -> None:
    with pytest.raises(TraceError, match="targets depend on parameters"):
        NormalizeLoss().apply(
            read(
                """
                block model:
                  x: [b, 5] = input x
                  w: [5, 5] = parameter w
                  logits: [b, 5] = linear(x, w)
                  teacher: [b] int = argmax(logits, -1)
                  loss: [] = cross_entropy_loss(logits, teacher)
                  return loss
                """
            ),
            None,
        )
