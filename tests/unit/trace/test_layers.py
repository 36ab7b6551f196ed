"""Layers and their classes: which are the same, what lies before, between and after them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.graph import EPILOGUE, PROLOGUE, TABLES, Role, info
from autopar.trace.lists import layer_path
from tests import models


def test_equal_layers_are_one_class() -> None:
    _, program = models.gpt()
    assert [call.block for call in program.calls if call.block not in ("count", TABLES)] == [
        PROLOGUE, "Block", "Block", "Block", EPILOGUE,
    ]  # fmt: skip
    assert [call.path for call in program.layer_calls] == ["transformer.h.0", "transformer.h.1", "transformer.h.2"]
    refs = {info(n).ref for n in program.blocks["Block"].placeholders(Role.PARAMETER)}
    assert {"ln_1.weight", "mlp.c_fc.bias"} <= refs
    assert not any("transformer" in ref for ref in refs)


def test_tables_need_no_parameters() -> None:
    """RoPE tables: every stage makes its own."""
    _, program = models.llama()
    tables = program.blocks[TABLES]
    assert not tables.placeholders(Role.PARAMETER, Role.VALUE)
    assert len(program.call_of(TABLES).outputs) == 2
    assert all(set(program.call_of(TABLES).outputs) < set(call.inputs) for call in program.layer_calls)


@pytest.mark.parametrize("depth", [2, 5])
def test_blocks_do_not_grow_with_depth(depth: int) -> None:
    _, program = models.llama(num_hidden_layers=depth)
    assert len(program.layer_calls) == depth
    assert sum(len(block.nodes) for block in program.blocks.values()) == sum(
        len(block.nodes) for block in models.llama()[1].blocks.values()
    )


class Alternating(nn.Module):
    """Wide and narrow MLPs by turns, and a scale between layers that belongs to none."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 20)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 20)) for width in (40, 60, 40, 60)
        )
        self.head = nn.Linear(20, 50)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x) * 0.5
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_different_layers_are_different_classes() -> None:
    """Ops between layers join the layer before, after the last one too."""
    ids = torch.zeros(2, 16, dtype=torch.long, device="meta")
    program = models.layered(Alternating(), {"input_ids": ids, "labels": ids})
    assert [call.block for call in program.layer_calls] == ["Sequential", "Sequential2"] * 2
    for name in ("Sequential", "Sequential2"):
        ops = [str(n.target) for n in program.blocks[name].ops]
        assert ops[-2:] == ["aten.mul.Tensor", "aten.add.Tensor"]
    assert not any("mul" in str(n.target) for n in program.blocks[EPILOGUE].ops)


@pytest.mark.parametrize(
    ("module", "path"),
    [
        ("model.layers.3.mlp.up", "model.layers.3"),
        ("layers.11", "layers.11"),
        ("h.0.experts.5", "h.0"),  # the outermost list
        ("model.norm", None),
        ("", None),
    ],
)
def test_layer_path(module: str, path: str | None) -> None:
    assert layer_path(module) == path
