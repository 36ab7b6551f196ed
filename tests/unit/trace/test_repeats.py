"""Deep lists are traced in the time of three layers, and give the program that tracing every layer gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.compile.compiler import _layers, prepare
from autopar.ir.graph import COUNT, Program, info
from autopar.ir.text import block_text
from autopar.rules.arguments import option
from autopar.trace.huggingface import default_inputs
from examples.gpt import GPTConfig, build
from examples.llama import tiny_llama

IDS = torch.zeros(2, 16, dtype=torch.long)
INPUTS = {"input_ids": IDS, "labels": IDS}


def same(folded: Program, whole: Program) -> bool:
    """Equal but for the names of values between calls."""
    blocks = [{n: block_text(b) for n, b in p.blocks.items() if n != COUNT} for p in (folded, whole)]
    calls = [[(c.block, c.path, len(c.inputs), len(c.outputs)) for c in p.calls] for p in (folded, whole)]
    facts = [(p.parameters, p.buffers, p.inputs, p.tied, p.fused) for p in (folded, whole)]
    return blocks[0] == blocks[1] and calls[0] == calls[1] and facts[0] == facts[1]


def test_a_folded_trace_is_the_whole_trace() -> None:
    model = build(GPTConfig(n_layer=7, d_model=32, n_head=2))
    folded, whole = (_layers(model, INPUTS, "fp32", "refuse", fold) for fold in (True, False))
    assert same(folded, whole)
    assert len(folded.layer_calls) == 7


def test_what_layers_are_given_but_do_not_read_is_not_returned() -> None:
    model = tiny_llama(layers=7)
    inputs = default_inputs(model, 2, 16)
    folded, whole = (_layers(model, inputs, "fp32", "refuse", fold) for fold in (True, False))
    assert same(folded, whole)


def test_each_layer_reads_the_one_before() -> None:
    calls = _layers(build(GPTConfig(n_layer=7, d_model=32, n_head=2)), INPUTS, "fp32", "refuse", True).layer_calls
    for before, after in zip(calls, calls[1:], strict=False):
        assert before.outputs[0] in after.inputs


class Indexed(nn.Module):
    """A list of layers that differ in what `make` gives each."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(layers)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())
        return loss


class Layer(nn.Module):
    def __init__(self, index: int, scale: float = 1.0, width: int = 8) -> None:
        super().__init__()
        self.layer_idx, self.scale = index, scale
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x.add(self.down(self.up(x)) * self.scale)


class ScaledByIndex(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x.add(self.down(self.up(x)) / (self.layer_idx + 1))


class BranchesOnIndex(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x.add(self.down(self.up(x)))
        return x.mul(2.0) if self.layer_idx == 3 else x


class Activated(Layer):
    def __init__(self, index: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__(index)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return x.add(self.activation(self.down(self.up(x))))


@pytest.mark.parametrize(
    "layers",
    [
        [BranchesOnIndex(i) for i in range(8)],
        [Activated(i, torch.relu if i == 4 else torch.tanh) for i in range(8)],
        [Layer(i, scale=1.0 + (i == 3)) for i in range(8)],
        [Layer(i, width=8 + 8 * (i == 4)) for i in range(8)],
        [ScaledByIndex(i) for i in range(8)],
    ],
    ids=["a branch on the index", "a function differs", "an option differs", "a width differs", "the index is used"],
)
def test_lists_that_do_not_repeat_are_traced_whole(layers: list[Any]) -> None:
    program = prepare(Indexed(layers), INPUTS, "fp32")
    assert same(program, _layers(Indexed(layers), INPUTS, "fp32", "refuse", False))
    assert len(program.layer_calls) == 8


class MaskedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
        q, k, v = (t.unsqueeze(1) for t in self.qkv(x).chunk(3, dim=-1))
        return x + nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal).squeeze(1)


class Masked(nn.Module):
    """Layers that differ in what the model gives them alone: f(ull), l(ocal) or d(ata) masks, each made once."""

    def __init__(self, pattern: str, new: bool = True) -> None:
        super().__init__()
        self.pattern, self.new = pattern, new
        self.embedding = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(MaskedLayer() for _ in pattern)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, position = self.embedding(input_ids), torch.arange(input_ids.shape[1], device=input_ids.device)
        full = position <= position[:, None]
        local = full & (position > position[:, None] - 3)
        masks = {"f": full[None, None], "l": local[None, None], "d": full & (input_ids != 0)[:, None, None]}
        for kind, layer in zip(self.pattern, self.layers, strict=True):
            x = layer(x, masks[kind][:, :] if self.new else masks[kind])
        loss: Tensor = nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())
        return loss


class Flagged(Masked):
    """The same, with a flag in place of a mask."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for kind, layer in zip(self.pattern, self.layers, strict=True):
            x = layer(x, causal=kind == "f")
        loss: Tensor = nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())
        return loss


def attentions(program: Program) -> list[tuple[Any, ...]]:
    """What each layer's attention says of masks, in the order of the layers."""
    found = []
    for call in program.layer_calls:
        (node,) = (n for n in program.blocks[call.block].ops if "attention" in str(n.target))
        found.append((option(node, "attn_mask") is not None, bool(option(node, "is_causal")), info(node).window))
    return found


SAYS = {"f": (False, True, None), "l": (True, False, 3), "d": (True, False, None)}


@pytest.mark.parametrize(
    ("pattern", "new"), [("fflfflf", True), ("fflfflf", False), ("ffdffff", False), ("llfllll", False)]
)
def test_each_layer_has_its_own_mask(pattern: str, new: bool) -> None:
    program = prepare(Masked(pattern, new), INPUTS, "fp32")
    assert attentions(program) == [SAYS[kind] for kind in pattern]


def test_each_layer_has_its_own_flags() -> None:
    program = prepare(Flagged("fflfflf"), INPUTS, "fp32")
    assert [causal for _, causal, _ in attentions(program)] == [kind == "f" for kind in "fflfflf"]


@pytest.mark.parametrize("kind", SAYS)
def test_masks_that_all_layers_are_given_do_not_unfold(kind: str) -> None:
    folded, whole = (_layers(Masked(kind * 7, False), INPUTS, "fp32", "refuse", fold) for fold in (True, False))
    assert same(folded, whole)
