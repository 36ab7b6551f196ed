"""Random samples of a padded plan: as long as the user's own, with ids and targets that are such when padded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.compile.compiler import prepare
from autopar.errors import PlanError
from autopar.ir.graph import B, S, TensorInfo
from autopar.rules.padding import paddings_of
from autopar.runtime.data import padded
from autopar.verification.padding import compare_with_pads
from autopar.verification.samples import Input, inputs_of, random_batch
from tests.passes.programs import read

WORDS, D, TOKENS, SEQUENCE = 11, 8, 5, 8
Read = Callable[[Tensor, Tensor], Tensor]


class Tagger(nn.Module):
    """`read` makes targets of the labels and the mask."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.words, self.head, self.read = nn.Embedding(WORDS, D), nn.Linear(D, WORDS), read

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.words(input_ids)).flatten(0, 1)
        return F.cross_entropy(logits, self.read(labels, attention_mask).flatten())


READINGS: dict[str, Read] = {
    "as they are": lambda labels, mask: labels,
    "where the mask is": lambda labels, mask: torch.where(mask.bool(), labels, -100),
    "but where it is not": lambda labels, mask: torch.where(mask == 0, -100, labels),
    "filled": lambda labels, mask: labels.masked_fill(mask == 0, -100),
    "shifted": lambda labels, mask: F.pad(labels, (0, 1), value=-100)[:, 1:],
}


@pytest.mark.parametrize("read", READINGS.values(), ids=READINGS.keys())
@pytest.mark.parametrize("kind", [torch.long, torch.bool], ids=str)
def test_samples_of_a_padded_plan(read: Read, kind: torch.dtype) -> None:
    """The mask is no target, whatever is made of it: it is 0 or 1, and 0 at pads; labels are ignored there."""
    ids = torch.zeros(2, 16, dtype=torch.long)
    program = prepare(Tagger(read).double(), {"input_ids": ids, "attention_mask": ids.to(kind), "labels": ids}, "fp64")
    inputs, padding = inputs_of(program), paddings_of(program)
    assert inputs["labels"] == Input(("b", "s"), "int64", (str(WORDS),), -100)
    assert inputs["input_ids"].values == (str(WORDS),)
    mask = inputs.get("attention_mask", Input(("b", "s"), str(kind).removeprefix("torch.")))
    assert mask.ignored is None and mask.values == ("2",)
    batch = random_batch(inputs, 4, TOKENS, 0)
    rows = tuple((p.input, p.dim, p.value) for p in padding)
    longer = padded(batch, rows, SEQUENCE)
    assert (longer["labels"][:, TOKENS:] == -100).all() and (longer["input_ids"][:, TOKENS:] == 0).all()
    for name, value in batch.items():
        assert value.shape == (4, TOKENS) and longer[name].dtype == value.dtype
        assert torch.equal(longer[name][:, :TOKENS], value) and (name == "labels" or not longer[name][:, TOKENS:].any())


@pytest.mark.parametrize(("kind", "value"), [(torch.bool, 1), (torch.uint8, 156)], ids=str)
def test_what_a_dtype_makes_of_an_ignored_target_is_a_target(kind: torch.dtype, value: int) -> None:
    text = """
    block model:
      x: [b, s] = input x
      y: [b, s] {} = input y
      l: [b, s] int = to(y, torch.int64)
      z: [b, 1, s] = unsqueeze(x, 1)
      c: [] = cross_entropy_loss(z, l, None, 2, -100)
      return c
    """
    names = {torch.bool: "bool", torch.uint8: "int"}
    program = read(text.format(names[kind]))
    facts = {"x": TensorInfo((B, S), torch.float64), "y": TensorInfo((B, S), kind)}
    program = replace(program, inputs=facts)
    assert [p.value for p in paddings_of(program)] == [0, value]
    with pytest.raises(PlanError, match="cross_entropy_loss of"):
        compare_with_pads(program, {}, TOKENS, SEQUENCE)
