"""Frozen parameters and LoRA: what is not trained keeps its values, what is trained is exact, under every layout."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.emit.project import save_tensors
from autopar.emit.source import load_source
from autopar.runtime.trainer import Trainer
from autopar.search.layouts import MEGATRON_SP
from autopar.trace.huggingface import default_inputs
from tests.distributed.programs import Subject, assert_parity, llama, local_batch, subject, trainer_of
from tests.harness import run_ranks
from tests.models import layered


class LoRA(nn.Module):
    """W x + b plus a product of two narrow matrices; W and b are frozen."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = linear.requires_grad_(False)
        self.A, self.B = (
            nn.Linear(linear.in_features, rank, bias=False),
            nn.Linear(rank, linear.out_features, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + 2.0 * self.B(self.A(x))
        return result


def _freeze_layers(model: Any) -> None:
    """Embedding and the first two layers: nothing before the third has a gradient."""
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:2].requires_grad_(False)


def _freeze_some(model: Any) -> None:
    """Weights in the middle of each layer: gradients go past them."""
    for layer in model.model.layers:
        layer.mlp.up_proj.requires_grad_(False)
        layer.self_attn.k_proj.requires_grad_(False)
        layer.input_layernorm.requires_grad_(False)
    model.lm_head.requires_grad_(False)


def _add_lora(model: Any) -> None:
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.self_attn.v_proj = map(LoRA, (layer.self_attn.q_proj, layer.self_attn.v_proj))
        layer.mlp.down_proj = LoRA(layer.mlp.down_proj)


CHANGES = {"layers": _freeze_layers, "some": _freeze_some, "lora": _add_lora}
PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2, "micro_batch": 3},
    "tp2": {"tp": 2},
    "tp2-sp": {"tp": 2, "layout": MEGATRON_SP},
    "pp2": {"pp": 2},
    "zero3": {"dp": 2, "micro_batch": 3, "zero": 3},
    "zero3-tp2-recompute": {"dp": 2, "tp": 2, "micro_batch": 3, "zero": 3, "recompute": "all"},
}


@cache
def _subject(change: str) -> Subject:
    model = copy.deepcopy(llama(torch.float64).model)
    CHANGES[change](model.float())
    return subject(model, torch.float64, layered(model.double(), default_inputs(model, 2, 16)))


CASES = [(change, plan) for change in CHANGES for plan in PLANS]


@pytest.mark.in_turn(5)
@pytest.mark.parametrize(("change", "plan"), CASES)
def test_parity(change: str, plan: str) -> None:
    made = _subject(change)
    assert_parity(made, made.plan(**PLANS[plan]))


@pytest.mark.parametrize("change", CHANGES)
def test_frozen_parameters_have_no_gradient_and_no_state(change: str) -> None:
    made = _subject(change)
    source, weights = made.source(made.plan(dp=2, micro_batch=3, zero=3)), made.weights
    frozen = {name for name, p in made.model.named_parameters() if not p.requires_grad}

    def on_rank(rank: int) -> None:
        trainer = trainer_of(source, weights)
        trainer.step(local_batch(trainer, made.batches[0]))
        whole = trainer.state_dict()
        assert not frozen & trainer.gradients().keys()
        assert all(torch.equal(whole[name], weights[name]) for name in frozen)
        assert not any(trainer.optimizer.states(name) for name in trainer.parameters if name in frozen)

    run_ranks(2, on_rank, timeout=120)


@pytest.mark.parametrize("change", CHANGES)
def test_z4_frozen_parameters_are_saved_and_loaded(change: str, tmp_path: Path) -> None:
    """Z4: saved under ZeRO-3 and resumed by fresh processes under another plan: every weight, also the frozen."""
    made = _subject(change)
    folder = tmp_path / "saved"
    source, weights = made.source(made.plan(dp=2, micro_batch=3, zero=3)), made.weights
    other = made.source(made.plan(tp=2))

    def train(rank: int) -> dict[str, Tensor]:
        trainer = trainer_of(source, weights)
        for batch in made.batches[:2]:
            trainer.step(local_batch(trainer, batch))
        trainer.save(folder)
        return trainer.state_dict()

    save_tensors(tmp_path / "weights.pt", dict(made.model.named_buffers()))  # what a program's folder has

    def resume(rank: int) -> tuple[dict[str, Tensor], float, int]:
        program = load_source(other)
        program.__file__ = str(tmp_path / "model.py")
        trainer = Trainer(program, folder)
        loaded = {name: x.clone() for name, x in trainer.state_dict().items()}  # a step works in place
        return loaded, trainer.step(local_batch(trainer, made.batches[2])).loss, trainer.steps

    saved = run_ranks(2, train, timeout=120)[0]
    for whole, loss, steps in run_ranks(2, resume, timeout=120):
        assert whole.keys() == saved.keys() == dict(made.model.named_parameters()).keys()
        assert all(torch.equal(whole[name], saved[name]) for name in saved)
        assert steps == 3
        assert loss == pytest.approx(made.reference.losses[2], rel=1e-9)


class Head(nn.Module):
    """A frozen trunk with a trained head; a frozen bias beside a trained weight."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16)]).requires_grad_(False)
        self.head = nn.Linear(16, 4)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.trunk:
            x = torch.tanh(layer(x))
        return F.mse_loss(self.head(x), target)


@pytest.mark.parametrize("plan", ["dp2", "tp2", "zero3"])
def test_a_trained_head_on_a_frozen_trunk(plan: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (12, 8), "target": (12, 4)}
    data = [
        {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
        for _ in range(5)
    ]
    model = Head().double()
    made = subject(model, torch.float64, layered(model, {k: v[:2] for k, v in data[0].items()}), data)
    assert_parity(made, made.plan(**PLANS[plan]))
