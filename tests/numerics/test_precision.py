"""Half precision where it is safe, and only there: RoPE tables (N7), the loss (N8), master weights (N3)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.compile.compiler import compile_program, prepare
from autopar.emit.emission import Predicted
from autopar.emit.source import load_source, model_source
from autopar.plan.plan import Optimizer, Plan, Solution
from autopar.runtime.choices import Mesh
from autopar.runtime.trainer import Trainer
from autopar.trace.huggingface import default_inputs
from examples.llama import tiny_llama
from tests.harness import run_ranks


def one_process(model: nn.Module, inputs: dict[str, object], sequence: int, optimizer: Optimizer) -> ModuleType:
    program = prepare(model, inputs, "bf16")
    layers = max(1, len(program.layer_calls))
    plan = Plan.of(
        Mesh(), 2, 2, sequence, ((0, layers),), precision="bf16", optimizer=optimizer, solution=Solution(1, {})
    )
    return load_source(model_source(compile_program(program, plan), plan, Predicted()))


def values(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.detach() for n, t in [*model.named_parameters(), *model.named_buffers()]}


def test_rope_tables_are_made_in_fp32_in_a_bf16_program() -> None:
    """N7: in bf16 positions 256 and 257 are one number; their tables must differ, as the model's own do."""
    model = tiny_llama(layers=2)
    program = one_process(model, default_inputs(model, 2, 16), 16, Optimizer())

    def tables(rank: int) -> list[Tensor]:
        trainer = Trainer(program, values(model), device="cpu")
        assert trainer.model.model.rotary_emb.inv_freq.dtype is torch.float32  # type: ignore[union-attr]
        return [table.detach() for table in trainer.model._tables(300, "cpu")]  # type: ignore[operator]

    (made,) = run_ranks(1, tables)
    hidden = torch.zeros(1, 300, 8, dtype=torch.bfloat16)
    own = model.model.rotary_emb(hidden, torch.arange(300)[None])
    for table, expected in zip(made, own, strict=True):
        assert torch.equal(table, expected)
        assert not torch.equal(table[0, 256], table[0, 257])


class Logits(nn.Module):
    """A loss over 50,000 classes straight from a table of random logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 50_000)
        nn.init.normal_(self.table.weight, std=4.0)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.table(input_ids).flatten(0, 1), labels.flatten())


def test_the_loss_of_bf16_logits_is_computed_in_fp32() -> None:
    """N8: rounding the logits is the only error left; a bf16 log-sum-exp would lose three digits more."""
    torch.manual_seed(0)
    model = Logits()
    ids = torch.randint(0, 8, (2, 4))
    labels = torch.randint(0, 50_000, (2, 4))
    program = one_process(model, {"input_ids": ids, "labels": labels}, 4, Optimizer())

    def loss(rank: int) -> float:
        trainer = Trainer(program, values(model), device="cpu")
        return trainer.step({"input_ids": ids, "labels": labels}).loss

    (actual,) = run_ranks(1, loss)
    rounded = model.table.weight.detach().bfloat16()[ids].flatten(0, 1)
    exact = F.cross_entropy(rounded.double(), labels.flatten()).item()
    in_bf16 = F.cross_entropy(rounded, labels.flatten()).item()
    assert abs(actual - exact) < 1e-6 * exact
    assert abs(in_bf16 - exact) > 1e-4 * exact  # else this test shows nothing


class Island(nn.Module):
    """A norm in fp32 whatever surrounds it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.autocast("cpu", enabled=False):
            z = F.layer_norm(y.float(), (8,))
        return F.mse_loss(z, target.float())


def test_t8_an_fp32_island_stays_fp32() -> None:
    """T8: the emitted program casts where the author's region without autocast does, and nowhere else."""
    torch.manual_seed(0)
    model = Island().bfloat16()
    batch: dict[str, Any] = {name: torch.randn(2, 8).bfloat16() for name in ("x", "target")}
    program = one_process(model, batch, 1, Optimizer())

    def loss(rank: int) -> float:
        return Trainer(program, {n: v.float() for n, v in values(model).items()}, device="cpu").step(batch).loss

    (actual,) = run_ranks(1, loss)
    expected = model(**batch).item()
    without = F.mse_loss(F.layer_norm(model.linear(batch["x"]), (8,)), batch["target"]).item()
    assert abs(actual - expected) < 1e-6 * expected
    assert abs(without - expected) > 1e-4 * expected  # else this test shows nothing


def test_updates_below_bf16_resolution_move_the_master_weights() -> None:
    """N3: at lr 1e-6 an update of a weight near 0.02 is far below half a bf16 step."""
    model = tiny_llama(layers=2)
    program = one_process(model, default_inputs(model, 2, 16), 16, Optimizer("AdamW", {"lr": 1e-6}))
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))

    def moved(rank: int) -> dict[str, Tensor]:
        trainer = Trainer(program, values(model), device="cpu")
        for _ in range(3):
            trainer.step({"input_ids": ids, "labels": ids})
        states = trainer.optimizer.states("model.norm.weight")
        assert all(state.dtype is torch.float32 for state in states.values())
        return trainer.state_dict()

    (after,) = run_ranks(1, moved)
    before = values(model)
    for name, weight in after.items():
        assert weight.dtype is torch.float32
        assert not torch.equal(weight, before[name]), name
    name = "model.norm.weight"  # its values are 1, where bf16 steps by 2^-8
    assert torch.equal(after[name].bfloat16(), before[name].bfloat16())
