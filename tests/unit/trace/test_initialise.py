"""Weights of a program: values, or the author's initialisation as data, drawn without the author's code."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.runtime.weights import draw
from autopar.trace.initialise import Weights, build_on_meta, weights_of
from examples.gpt import GPT, GPTConfig
from tests import zoo

CONFIG = GPTConfig(n_layer=2, d_model=64, vocab_size=512, block_size=64)


def drawn(weights: Weights, model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    shapes = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    return {name: draw(recipe, shapes[name], seed, name) for name, recipe in weights.recipes.items()}


def test_values_of_a_real_model() -> None:
    model = GPT(CONFIG)
    weights = weights_of(model)
    assert not weights.recipes and not weights.missing
    named = dict(model.named_parameters(remove_duplicate=False))
    assert weights.values.keys() == named.keys()  # both names of the tied weight
    assert all(torch.equal(weights.values[name], p) for name, p in named.items())


def like_the_authors(values: dict[str, Tensor], model: nn.Module) -> None:
    """Same mean and deviation within four standard errors, same constants."""
    for name, parameter in model.named_parameters():
        ours, theirs = values[name], parameter.detach().float()
        if theirs.std() == 0 or theirs.numel() == 1:
            assert torch.equal(ours, theirs), name
            continue
        error = 4 * float(theirs.std()) / math.sqrt(theirs.numel())
        assert abs(float(ours.mean() - theirs.mean())) < 2 * error, name
        assert abs(float(ours.std() - theirs.std())) < 2 * error, name


def test_recorded_factory() -> None:
    """GPT: normal of 0.02, residual projections narrower, zeros and ones."""

    def build() -> nn.Module:
        return GPT(CONFIG)

    model = build_on_meta(build)
    weights = weights_of(model, build)
    assert not weights.missing and not weights.values
    torch.manual_seed(0)
    like_the_authors(drawn(weights, model), build())
    assert weights.recipes["transformer.h.0.mlp.c_proj.weight"] == [["normal_", 0.0, 0.02 / math.sqrt(4)]]
    assert weights.recipes["transformer.h.0.mlp.c_fc.bias"][-1][0] in ("zero_", "fill_")


def test_recorded_huggingface() -> None:
    """HF's own _init_weights; its buffers have their real values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = weights_of(model)
    torch.manual_seed(0)
    real = LlamaForCausalLM(config)
    assert not weights.missing
    like_the_authors(drawn(weights, model), real)
    buffers = dict(real.named_buffers())
    assert "model.rotary_emb.inv_freq" in weights.values
    assert all(torch.equal(value, buffers[name]) for name, value in weights.values.items())


def test_draws_depend_on_seed_and_name_alone() -> None:
    model = build_on_meta(lambda: GPT(CONFIG))
    weights = weights_of(model, lambda: GPT(CONFIG))
    first, again, other = (drawn(weights, model, seed) for seed in (0, 0, 1))
    a, b = "transformer.h.0.mlp.c_fc.weight", "transformer.h.1.mlp.c_fc.weight"
    assert torch.equal(first[a], again[a])
    assert not torch.equal(first[a], other[a]) and not torch.equal(first[a], first[b])


class Table(nn.Module):
    def __init__(self, reset: Callable[[Tensor], object] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        if reset is not None:
            with torch.no_grad():
                reset(self.linear.weight)


def test_buffers_of_a_factory() -> None:
    """T3: a non-persistent buffer has its value, though the model was built on meta."""
    weights = weights_of(build_on_meta(Table), Table)
    assert torch.equal(weights.values["table"], torch.arange(4.0))


def test_lost_buffers() -> None:
    with pytest.raises(TraceError, match=r"buffers table are on meta .* parallelize\(build, …\)"):
        weights_of(build_on_meta(Table))


def test_meta_without_a_factory_has_no_values() -> None:
    """It is refused rather than reset to other values."""
    model = build_on_meta(lambda: nn.Linear(3, 3))
    assert weights_of(model).missing == ("weight", "bias")


@pytest.mark.parametrize(
    "reset", [lambda w: w[:, 0].zero_(), lambda w: w.copy_(torch.eye(4)), lambda w: w.mul_(torch.ones(4, 4))]
)
def test_initialisation_that_cannot_be_recorded(reset: Callable[[Tensor], object]) -> None:
    def build() -> nn.Module:
        return Table(reset)

    with pytest.raises(TraceError, match="the initialisation of linear.weight .* cannot be recorded: use --init"):
        weights_of(build_on_meta(build), build)


class Handmade(nn.Module):
    """Parameters from factories and arithmetic, among temporaries whose memory is free again at once."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList()
        for _ in range(20):
            torch.empty(8).uniform_(5, 6)
            self.scales.append(nn.Parameter(torch.ones(8)))
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.02)


def test_factories_are_recorded_and_freed_temporaries_are_not() -> None:
    recipes = weights_of(build_on_meta(Handmade), Handmade).recipes
    assert [recipes[f"scales.{i}"] for i in range(20)] == [[["fill_", 1.0]]] * 20
    assert recipes["weight"] == [["normal_"], ["mul_", 0.02]]


class Parts(nn.Module):
    """Rows of a parameter initialised on their own, as fused projections and padding tokens are."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(4, 12)
        with torch.no_grad():
            for i in range(3):
                self.fused.weight[4 * i : 4 * i + 4].fill_(float(i))
            self.fused.weight[5].zero_()
        self.table = nn.Embedding(6, 3, padding_idx=2)


def test_parts_of_a_parameter() -> None:
    weights = weights_of(build_on_meta(Parts), Parts)
    built, values = Parts(), drawn(weights, build_on_meta(Parts))
    assert torch.equal(values["fused.weight"], built.fused.weight)
    zero = values["table.weight"].abs().sum(1) == 0
    assert zero.tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("name", ["bert", "t5", "whisper"])
def test_families_from_meta_need_no_init(name: str) -> None:
    """Rows of padding tokens are zeroed by the initialisation of these."""
    with torch.device("meta"):
        model = zoo.FAMILIES[name].build()
    weights = weights_of(model)
    assert not weights.missing
    spread = {n: float(v.std()) for n, v in drawn(weights, model).items() if v.numel() > 100}
    expected = {n: float(p.std()) for n, p in zoo.FAMILIES[name].build().named_parameters() if n in spread}
    for parameter, std in expected.items():
        assert abs(spread[parameter] - std) < 0.2 * std + 1e-6, parameter


def _truncated() -> nn.Linear:
    layer = nn.Linear(64, 64)
    nn.init.trunc_normal_(layer.weight, mean=0.5, std=1.0, a=-0.5, b=1.0)
    return layer


def test_a_truncated_normal_is_drawn_within_its_bounds() -> None:
    """Its mean and deviation are those of torch's own draws, which on meta do nothing."""
    recipe = weights_of(build_on_meta(_truncated), _truncated).recipes["weight"]
    values, own = draw(recipe, torch.Size((64, 64)), 0, "weight"), _truncated().weight
    assert values.min() >= -0.5 and values.max() <= 1.0
    torch.testing.assert_close(values.mean(), own.mean(), atol=0.03, rtol=0)
    torch.testing.assert_close(values.std(), own.std(), atol=0.03, rtol=0)


def test_vit_on_meta_has_all_its_values() -> None:
    with torch.device("meta"):
        model = zoo.FAMILIES["vit"].build()
    weights = weights_of(model)
    assert not weights.missing
    assert {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"} <= weights.recipes.keys()
