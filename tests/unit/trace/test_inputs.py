"""What goes into a trace and what comes out: example inputs of families, keywords, losses, buffers that are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.ir.graph import MODEL, B, Role, S, info
from autopar.trace.example_inputs import default_inputs, longest_sequence
from autopar.trace.export import trace
from tests import zoo
from tests.interpreter import run_program

SHAPES = {
    "gpt2": {"input_ids": (2, 12), "labels": (2, 12)},
    "bert": {"input_ids": (2, 12), "labels": (2, 12)},
    "t5": {"input_ids": (2, 12), "labels": (2, 12)},
    "whisper": {"input_features": (2, 8, 32), "labels": (2, 12)},
    "vit": {"pixel_values": (2, 3, 24, 24), "labels": (2,)},
    "resnet": {"pixel_values": (2, 3, 224, 224), "labels": (2,)},
}


@pytest.mark.parametrize("name", list(SHAPES))
def test_default_inputs(name: str) -> None:
    """From the config and the signature; those that the family is fed in tests are the same keywords."""
    with torch.device("meta"):
        model = zoo.FAMILIES[name].build()
    found = {k: tuple(v.shape) for k, v in default_inputs(model, 2, 12).items() if isinstance(v, Tensor)}
    assert found == SHAPES[name]
    assert (longest_sequence(model) is None) == (name in ("vit", "resnet"))


def test_mel_bins_are_no_sequence() -> None:
    with torch.device("meta"):
        model = zoo.FAMILIES["whisper"].build()
    assert default_inputs(model, 2, 8)["labels"].shape == (2, 7)


class Clashing(nn.Module):
    """Keywords that Python, torch or the trace use themselves; the loss is not the first result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)
        self.scale: Tensor
        self.register_buffer("seen", torch.arange(3))
        self.register_buffer("scale", torch.full((6,), 2.0))
        self.register_buffer("scratch", torch.zeros(6), persistent=False)

    def forward(self, input: Tensor, F: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> dict[str, Any]:
        prediction = self.linear(input * self.scale) * scale
        return {"prediction": prediction, "mean": prediction.mean(), "loss": (prediction - F).square().mean()}


def test_clashing_keywords() -> None:
    """`ref` is the user's keyword; plain and None arguments are fixed; "loss" is found by its name."""
    model = Clashing()
    inputs = {"input": torch.randn(3, 6), "F": torch.randn(3, 1), "scale": 0.5, "mask": None}
    program = trace(model, inputs, torch.float32)
    assert set(program.inputs) == {"input", "F"}
    refs = {info(n).ref for n in program.blocks[MODEL].placeholders(Role.INPUT)}
    assert refs == {"input", "F"} and program.inputs["input"].shape == (B, 6)
    torch.testing.assert_close(run_program(program, model, inputs), model(**inputs)["loss"])


def test_buffers_that_nothing_reads_are_known() -> None:
    program = trace(Clashing(), {"input": torch.zeros(3, 6), "F": torch.zeros(3, 1)}, torch.float32)
    assert "scale" in program.buffers
    assert set(program.persistent) == {"seen", "scale"}


class Returns(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.linear = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        loss = y.mean()
        return {
            "bare": loss, "first": (loss, y), "only": (y, loss), "nested": {"out": (y, y), "loss": loss},
            "two": (y, loss, y.sum()), "none": (y, y), "vector": {"loss": y},
        }[self.what]  # fmt: skip


@pytest.mark.parametrize("what", ["bare", "first", "only", "nested"])
def test_the_loss_is_found(what: str) -> None:
    assert info(trace(Returns(what), {"x": torch.zeros(3, 6)}, torch.float32).blocks[MODEL].results[0]).shape == ()


@pytest.mark.parametrize(
    ("what", "said"), [("two", r"\(\(b, 1\), \(\), \(\)\)"), ("none", "loss=a callable"), ("vector", "'loss'")]
)
def test_no_loss_is_found(what: str, said: str) -> None:
    with pytest.raises(TraceError, match="must return the loss first"):
        trace(Returns(what), {"x": torch.zeros(3, 6)}, torch.float32)


def test_nested_inputs_are_refused_by_name() -> None:
    class Nested(nn.Module):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return batch["x"].mean()

    with pytest.raises(
        TraceError, match=r"input 'batch' is a dict with tensors in it \(x, y\): pass each as a keyword"
    ):
        trace(Nested(), {"batch": {"x": torch.zeros(2, 3), "y": torch.zeros(2)}}, torch.float32)


class MaskBuffer(nn.Module):
    """nanoGPT's mask: a buffer of 64 × 64, cut to the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 12)
        self.head = nn.Linear(12, 10)
        self.bias: Tensor
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        s = x.shape[1]
        scores = (x @ x.transpose(1, 2)).masked_fill(self.bias[:s, :s] == 0, float("-inf"))
        return F.cross_entropy(self.head(scores.softmax(-1) @ x).flatten(0, 1), labels.flatten())


def test_the_longest_sequence_of_a_buffer() -> None:
    """Lengths up to the buffer's size, and a symbol still."""
    ids = torch.zeros(2, 16, dtype=torch.long)
    program = trace(MaskBuffer(), {"input_ids": ids, "labels": ids}, torch.float32)
    assert program.sequence_range == (2, 64)
    assert any(S in info(n).shape for n in program.blocks[MODEL].ops)
