"""Emitted programs of small models that earlier emitters wrote wrongly, against one process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.emit.source import load_source
from autopar.errors import PlanError
from tests import models
from tests.distributed.programs import (
    GLOBAL_BATCH,
    SEQUENCE,
    VOCABULARY,
    assert_parity,
    parallel,
    subject,
)

WIDTH = 16


class Base(nn.Module):
    """Embedding, residual linear layers, head; what a case changes is a method."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def layers(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.gelu(block(x), approximate="tanh")
        return x

    def between(self, x: Tensor, input_ids: Tensor) -> Tensor:
        return x

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.between(self.layers(self.embedding(input_ids)), input_ids)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


# --------------------------------------------------------------------------------
# Arguments


class SumInFloat(Base):
    def between(self, x: Tensor, input_ids: Tensor) -> Tensor:
        count = (input_ids > 3).sum(-1, keepdim=True, dtype=torch.float32).sqrt()
        return x * count.unsqueeze(-1).to(x.dtype) * 0.1


class ScaledAdd(Base):
    def between(self, x: Tensor, input_ids: Tensor) -> Tensor:
        x = torch.add(x, x.tanh(), alpha=3) - torch.sub(x, x.exp(), alpha=0.5)
        return x + F.softmax(x, -1, dtype=torch.float32).mean(-1, keepdim=True, dtype=torch.float32).to(x.dtype)


class InfiniteMask(Base):
    def between(self, x: Tensor, input_ids: Tensor) -> Tensor:
        scores = x @ x.transpose(1, 2)
        kept = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        return scores.masked_fill(~kept, float("-inf")).softmax(-1) @ x


class InfiniteFull(Base):
    def between(self, x: Tensor, input_ids: Tensor) -> Tensor:
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf"), device=x.device).triu(1)
        return (x @ x.transpose(1, 2) + mask).softmax(-1) @ x


class Comparisons(Base):
    def between(self, x: Tensor, input_ids: Tensor) -> Tensor:
        return torch.where((input_ids > 3).unsqueeze(-1) == (x > 0), x, 2 * x)


class SizesInProducts(Base):
    def between(self, x: Tensor, input_ids: Tensor) -> Tensor:
        return x * (x.shape[1] + 1) / (x.shape[1] * x.shape[1] + 2)


class ColumnOfOnes(Base):
    """A bias that is no bias of a linear: one row for each channel, broadcast over more than the last dim."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.ones(1, 1, WIDTH))
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)

    def between(self, x: Tensor, input_ids: Tensor) -> Tensor:
        result: Tensor = self.mix(x) + self.offset
        return result


class NoDropout(Base):
    """The linear after a dropout that is written inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(8, WIDTH)

    def between(self, x: Tensor, input_ids: Tensor) -> Tensor:
        result: Tensor = self.part(F.dropout(x, 1e-15, True)[:, :, :8])
        return result


@pytest.mark.parametrize(
    "model",
    [
        SumInFloat, ScaledAdd, InfiniteMask, InfiniteFull, Comparisons, SizesInProducts, ColumnOfOnes, NoDropout,
    ],
)  # fmt: skip
def test_computes_what_the_model_computes(model: type[nn.Module]) -> None:
    made = subject(model(), torch.float64)
    assert_parity(made, made.plan())


# --------------------------------------------------------------------------------
# Pipelines


class Skip(Base):
    """A U-Net's skip: the last layer reads the first one's result too, over several stages."""

    def __init__(self) -> None:
        super().__init__(layers=4)

    def layers(self, x: Tensor) -> Tensor:
        made: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            if i == 3:
                x = x + made[0]
            x = F.gelu(block(x)) + x
            made.append(x)
        return x


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_skip_over_stages(pp: int, schedule: str) -> None:
    made = subject(Skip(), torch.float64)
    assert_parity(made, made.plan(pp=pp, schedule=schedule, micro_batch=3))


class EverySecondReadsAnother(Base):
    """Layers of one class, which read one of two tables."""

    def layers(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).to(x.dtype).unsqueeze(1)
        tables = (positions.sin(), positions.cos())
        for i, block in enumerate(self.blocks):
            x = x + F.gelu(block(x)) * tables[i % 2]
        return x


class LayersAtTheRoot(nn.Sequential):
    """The root is the list of layers: the first reads the ids, the others what is before them."""

    def __init__(self) -> None:
        d = WIDTH
        super().__init__(nn.Embedding(VOCABULARY, d), nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, VOCABULARY))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        x = input_ids
        for module in self:
            x = module(x)
        return F.cross_entropy(x.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("model", [EverySecondReadsAnother, LayersAtTheRoot])
@pytest.mark.parametrize("pp", [1, 2])
def test_layers_read_what_the_model_gives_them(model: type[nn.Module], pp: int) -> None:
    made = subject(model(), torch.float64)
    assert_parity(made, made.plan(pp=pp))


# --------------------------------------------------------------------------------
# Names


class ReadsInputsTwice(nn.Module):
    """Inputs with the names that hidden states and the emitter's own variables have."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.again = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def run(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.start(ids)
        for block in self.blocks:
            h = h + F.gelu(block(h))
        h = self.head(h + self.again(ids))
        return F.cross_entropy(h.flatten(0, 1), labels.flatten())


class InputsX(ReadsInputsTwice):
    def forward(self, x: Tensor, x0: Tensor) -> Tensor:
        return self.run(x, x0)


class InputsB(ReadsInputsTwice):
    def forward(self, b: Tensor, device: Tensor) -> Tensor:
        return self.run(b, device)


class InputsReceived(ReadsInputsTwice):
    def forward(self, received: Tensor, layer: Tensor) -> Tensor:
        return self.run(received, layer)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("model", "inputs"), [(InputsX, ("x", "x0")), (InputsB, ("b", "device")), (InputsReceived, ("received", "layer"))]
)
@pytest.mark.parametrize("pp", [1, 2])
def test_inputs_with_names_of_the_emitter(model: type[nn.Module], inputs: Sequence[str], pp: int) -> None:
    generator = torch.Generator().manual_seed(0)
    batch = {name: torch.randint(VOCABULARY, (GLOBAL_BATCH, SEQUENCE), generator=generator) for name in inputs}
    module = model()
    program = models.layered(module.double(), batch, torch.float64)
    made = subject(module, torch.float64, program)
    assert_parity(made, made.plan(pp=pp), [batch, batch])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.inner(x))


class LayersCalledModel(Base):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Model() for _ in range(2))

    def layers(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_layer_class_named_as_the_emitted_one() -> None:
    made = subject(LayersCalledModel(), torch.float64)
    assert_parity(made, made.plan())
    assert "class ModelLayer(nn.Module)" in made.source(made.plan())


@pytest.mark.parametrize("name", ["_count", "_last", "_prologue", "between_stages"])
def test_an_attribute_that_the_emitted_class_has_is_refused(name: str) -> None:
    model = Base()
    model.add_module(name, nn.Linear(WIDTH, WIDTH))
    made = subject(model, torch.float64)
    with pytest.raises(PlanError, match=rf"{name}\.weight of Base has a name"):
        made.source(made.plan())


def test_names_of_the_emitted_class_are_free_where_it_does_not_use_them() -> None:
    """`_layer` is a method of recomputed layers alone."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.gelu(self._layer(x))

    model = LayersCalledModel()
    model.blocks = nn.ModuleList(Layer() for _ in range(2))
    made = subject(model, torch.float64)
    load_source(made.source(made.plan()))
    with pytest.raises(PlanError, match=r"blocks\.0\._layer\.weight of LayersCalledModel"):
        made.source(made.plan(recompute="all"))


def test_modules_called_embedding() -> None:
    assert "embedded = F.embedding(" in parallel(torch.float64).source(parallel(torch.float64).plan())
