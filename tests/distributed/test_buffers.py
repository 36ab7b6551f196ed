"""Buffers of the original's state_dict are in that of the program and in its checkpoints, whatever the plan."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.emit.source import load_source
from autopar.runtime.trainer import Trainer
from tests.distributed.programs import VOCABULARY, Subject, assert_parity, local_batch, subject, trainer_of
from tests.harness import run_ranks


class Block(nn.Module):
    scale: Tensor
    shift: Tensor

    def __init__(self, d: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.never = nn.Linear(d, 3)
        self.register_buffer("scale", torch.rand(2 * d))
        self.register_buffer("shift", torch.rand(d), persistent=False)
        self.register_buffer("seen", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.shift + self.down(F.gelu(self.up(x)) * self.scale)
        return result


class Model(nn.Module):
    """Of its buffers the loss reads `scale`, `weights` and those not in the state_dict."""

    def __init__(self, d: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(layers))
        self.head = nn.Linear(d, VOCABULARY)
        self.register_buffer("weights", torch.rand(VOCABULARY))
        self.register_buffer("version", torch.tensor(7))
        self.register_buffer("scratch", torch.rand(3), persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy((self.head(x) * self.weights).flatten(0, 1), labels.flatten())


@cache
def made() -> Subject:
    torch.manual_seed(3)
    return subject(Model(), torch.float64)


PLANS: dict[str, dict[str, Any]] = {"pp2": {"pp": 2}, "tp2": {"tp": 2}, "zero3": {"dp": 2, "micro_batch": 3, "zero": 3}}


@pytest.mark.parametrize("plan", PLANS)
def test_the_state_dict_is_that_of_the_original(plan: str) -> None:
    """`parity` compares the names and values of the reference's weights, which are the original's state_dict."""
    assert made().reference.weights.keys() == made().model.state_dict().keys()
    assert_parity(made(), made().plan(**PLANS[plan]))


@pytest.mark.parametrize(("first", "then"), [("pp2", "tp2"), ("tp2", "zero3"), ("zero3", "pp2")])
def test_t3_a_checkpoint_restores_buffers_under_another_plan(first: str, then: str, tmp_path: Path) -> None:
    """The second program begins with other values of all that is in the state_dict, none of which may stay."""
    sources = [made().source(made().plan(**PLANS[plan])) for plan in (first, then)]
    saved = made().model.state_dict()
    others = {name: x if name not in saved else torch.zeros_like(x) for name, x in made().weights.items()}

    def on_rank(rank: int) -> dict[str, Tensor]:
        trainer = trainer_of(sources[0], made().weights)
        trainer.step(local_batch(trainer, made().batches[0]))
        trainer.save(tmp_path / "saved")
        folder = tmp_path / f"rank{rank}"
        folder.mkdir()
        torch.save(others, folder / "weights.pt")
        program = load_source(sources[1])
        program.__file__ = str(folder / "model.py")  # beside its weights
        return Trainer(program, tmp_path / "saved").state_dict()

    found: dict[str, Tensor] = {}
    for state in run_ranks(2, on_rank, timeout=120):
        found |= state
    assert found.keys() == saved.keys()
    for name, buffer in made().model.named_buffers():
        assert name not in saved or torch.equal(found[name], buffer.to(found[name].dtype)), name
    assert torch.equal(found["blocks.1.never.weight"], made().weights["blocks.1.never.weight"])


def test_what_the_loss_never_reads_is_named_once() -> None:
    ids = torch.zeros(2, 16, dtype=torch.long)
    result = autopar.parallelize(
        Model(layers=3), 1, gpu="cpu", inputs={"input_ids": ids, "labels": ids}, global_batch=4
    )
    line = "the loss never reaches 6 parameters, which keep their values: blocks.0.never.weight, blocks.0.never.bias, "
    assert str(result).count(line) == 1
    assert "blocks.1.never.bias and 2 more" in str(result)
