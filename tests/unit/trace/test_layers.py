"""Layers and their classes: which are the same, what lies before, between and after them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir.graph import BETWEEN, EPILOGUE, PROLOGUE, TABLES, Role, info
from autopar.passes.split_stages import SplitStages
from autopar.plan.plan import Plan
from autopar.runtime.choices import Mesh
from autopar.trace.lists import layer_lists, layer_path
from tests import models, zoo


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


class GivesDiagonal(nn.Module):
    """A layer that gives a view of its weight, by an op that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.linear(x * scale).relu(), self.linear.weight.diagonal()


class Diagonals(Alternating):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList(GivesDiagonal() for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, scale = self.embed(input_ids), torch.ones(16, device=input_ids.device)
        for layer in self.layers:
            x, scale = layer(x, scale)
        return F.cross_entropy(self.head(x * scale).flatten(0, 1), labels.flatten())


def test_a_view_of_a_parameter_leaves_its_layer_as_a_copy() -> None:
    """Else ZeRO-3 would free it after the layer."""
    ids = torch.zeros(2, 16, dtype=torch.long, device="meta")
    program = models.layered(Diagonals(), {"input_ids": ids, "labels": ids})
    results = program.blocks["GivesDiagonal"].results
    assert [str(n.target) for n in results] == ["aten.add.Tensor", "aten.clone.default"]


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


# --------------------------------------------------------------------------------
# Which lists hold layers, and what lies between


def lists_of(model: nn.Module) -> frozenset[str]:
    return layer_lists({n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}).paths


def _perceptron(*widths: int) -> nn.Sequential:
    pairs = zip(widths, widths[1:], strict=False)
    return nn.Sequential(*(m for i, o in pairs for m in (nn.Linear(i, o), nn.ReLU())))


def test_lists_of_the_families() -> None:
    """Stages are descended into; lists inside layers are not layers."""
    found = {}
    for name in ("t5", "whisper", "mixtral", "unet", "convnext"):
        with torch.device("meta"):
            found[name] = set(lists_of(zoo.FAMILIES[name].build()))
    assert found == {
        "t5": {"encoder.block", "decoder.block"},
        "whisper": {"model.encoder.layers", "model.decoder.layers"},
        "mixtral": {"model.layers"},
        "unet": {"down", "up"},
        "convnext": {"convnext.encoder.stages.*.layers"},
    }


def test_plain_lists() -> None:
    """A Sequential's items; torch's own encoder; one layer alone; a list of experts in a layer of two."""
    assert lists_of(_perceptron(4, 6, 8)) == {""}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 3)
    assert lists_of(encoder) == {"layers"}
    assert lists_of(nn.ModuleDict({"h": nn.ModuleList([_perceptron(4, 6, 8)])})) == {"h"}
    experts = [nn.ModuleDict({"experts": nn.ModuleList([_perceptron(4, 4) for _ in range(4)])}) for _ in range(2)]
    assert lists_of(nn.ModuleDict({"layers": nn.ModuleList(experts)})) == {"layers"}


def test_layer_of_a_module() -> None:
    lists = layer_lists(
        {f"stages.{i}.blocks.{j}.{n}": (i, 4) for i in range(3) for j in range(2) for n in ("a.w", "b.w")}
    )
    assert lists.layer("stages.1.blocks.0.a") == "stages.1.blocks.0"
    assert lists.layer("stages.1.downsample") is None
    assert lists.layer("head") is None


class Regressor(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.body(x), target)


def test_a_sequential_is_cut_at_its_items() -> None:
    x = torch.zeros(2, 8, device="meta")
    program = models.layered(Regressor(_perceptron(8, 6, 8, 8)), {"x": x, "target": x})
    assert [call.path for call in program.layer_calls] == [f"body.{i}" for i in range(6)]


class Narrowing(nn.Module):
    """Two lists with a projection between, whose weight is the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.first = nn.ModuleList(_perceptron(8, 6, 8) for _ in range(3))
        self.project = nn.Linear(8, 4)
        self.second = nn.ModuleList(_perceptron(4, 6, 4) for _ in range(3))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        start = x = self.stem(x)
        for layer in self.first:
            x = x + layer(x)
        x = self.project(x)
        for layer in self.second:
            x = x + layer(x)
        return F.mse_loss(torch.cat([x, start[:, :4]], -1), target)


def test_what_lies_between_two_lists_is_a_block() -> None:
    """With full parameter names, counted like a layer; the residual joins each layer, the last of a list too."""
    x = torch.zeros(2, 8, device="meta")
    program = models.layered(Narrowing(), {"x": x, "target": x})
    assert [call.block for call in program.layer_calls] == ["Sequential"] * 3 + ["between"] + ["Sequential2"] * 3
    between = program.blocks["between"]
    assert {info(n).ref for n in between.placeholders(Role.PARAMETER)} == {"project.weight", "project.bias"}
    assert [call.path for call in program.calls if program.is_between(call.block)] == [""]
    assert not program.is_between("Sequential") and program.is_between("between2")


class ReadLater(Narrowing):
    """The first layer's output is read by the last one's sum, and its mean by every layer of the second list."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = skip = self.first[0](self.stem(x))
        level = skip.mean()  # no batch dim
        for layer in self.first[1:]:
            x = layer(x)
        x = self.project(x)
        for layer in self.second:
            x = layer(x) * level
        return F.mse_loss(torch.cat([x, skip[:, :4]], -1), target)


def test_values_travel_over_stages() -> None:
    """P6: a skip link at pp3 is sent on by the stage between; so is a value without batch dim."""
    x = torch.zeros(2, 8, device="meta")
    program = models.layered(ReadLater(), {"x": x, "target": x})
    count = len(program.layer_calls)
    plan = Plan.of(Mesh(pp=3), 4, 1, 1, ((0, 2), (2, count - 1), (count - 1, count)), "1f1b")
    stages = SplitStages().apply(program, plan).stages
    carried = set(stages[0].sends) & set(stages[1].sends)
    shapes = sorted(str(program.value_info(value).shape) for value in carried)
    assert shapes == ["()", "(b, 8)"]
    assert all(before.sends == after.receives for before, after in zip(stages, stages[1:], strict=False))


class Scorer(nn.Module):
    """A model without a list of layers, or with its head alone."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 4) if hidden else nn.Identity()
        self.head = nn.Linear(4, 3)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.hidden(features).tanh()), labels)


@pytest.mark.parametrize("hidden", [True, False])
def test_without_a_list_all_before_the_head_is_one_run(hidden: bool) -> None:
    """Head and loss are the epilogue; what reads no parameter is no run of its own."""
    inputs = {"features": torch.zeros(2, 4), "labels": torch.zeros(2, dtype=torch.long)}
    program = models.layered(Scorer(hidden), inputs)
    read = {
        call.block: {info(n).ref for n in program.blocks[call.block].placeholders(Role.PARAMETER)}
        for call in program.calls
    }
    before = {BETWEEN: {"hidden.weight", "hidden.bias"}} if hidden else {}
    assert read == {**before, EPILOGUE: {"head.weight", "head.bias"}}
