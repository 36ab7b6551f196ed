"""Errors about a part of a layer: module path, line, the source or the graph around it, and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn

from tests.unit.test_errors import Chain, refusal


class Inner(nn.Module):
    """A part of a layer that a trace cannot hold, or that couples samples, on the line that the error names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.up(x)
        if self.kind == "nested branch" and h.mean() > 0:  # nested branch
            h = h * 2
        if self.kind == "nested sizes":
            h = h + h.sum(-1).nonzero().sum()  # nested sizes
        if self.kind == "nested coupling":
            h = h.sort(dim=0).values  # nested coupling
        return h


class Outer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.mlp = Inner(kind)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.mlp(x)
        return x + h


class Nested(Chain):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Outer(kind if i else "") for i in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.embedding(input_ids), labels)


def place(kind: str) -> tuple[str, str]:
    """(file:line, the line) that ends with a comment."""
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.endswith(f"  # {kind}"))
    return f"{__file__}:{line}", lines[line - 1].strip()


@pytest.mark.parametrize(
    ("kind", "way_out"), [("nested branch", "use torch.where"), ("nested sizes", "keep the shape and mask")]
)
def test_kept_whole_and_coupling_samples(kind: str, way_out: str) -> None:
    """dp=2 is refused, for the reason that the module is opaque: its path and line, not where it is called alone."""
    said = refusal(Nested(kind))
    line, text = place(kind)
    assert "train with dp=1 and micro_batch=global_batch" in said
    assert "it is kept whole: " in said and "layers.1.mlp" in said and line in said and text in said
    assert way_out in said and "> mlp_opaque(" in said


def test_what_couples_samples() -> None:
    """A sort over the batch: several micro-batches are refused by its line, for they exchange no samples."""
    said = refusal(Nested("nested coupling"), dp=2, micro_batch=1)
    assert f"(mlp, {place('nested coupling')[0]}): needs numbers of the whole batch" in said
    assert "> mlp_sort_values(" in said and "which micro-batches do not exchange" in said


class Recurrent(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(20, 20, batch_first=True)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, _ = self.lstm(self.embedding(input_ids))  # recurrent
        return self.loss(x, labels)


def test_recurrent() -> None:
    """Export would unroll it to the example's length."""
    said = refusal(Recurrent())
    line, text = place("recurrent")
    assert f"tracing failed in lstm, at {line}" in said and text in said
    assert "LSTM is recurrent" in said and "use attention, convolutions" in said
