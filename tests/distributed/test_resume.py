"""Saved and resumed: every tensor of model and optimizer bit for bit, and the losses of a run that never stopped."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.emit.project import save_tensors
from autopar.emit.source import load_source
from autopar.runtime.trainer import Trainer
from autopar.trace.opaque import opaque_modules
from tests.distributed import programs
from tests.distributed.families import family
from tests.distributed.opaque_models import OpaqueModel
from tests.distributed.programs import STEPS, VOCABULARY, Subject, local_batch, subject
from tests.distributed.test_frozen import CHANGES
from tests.harness import run_ranks
from tests.models import layered

FP64 = torch.float64
BEFORE, AFTER = 2, 3  # steps
assert BEFORE + AFTER == STEPS


class Film(nn.Module):
    """One linear layer whose parts lie on several stages: each conditions a block."""

    def __init__(self, d: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.emb, self.film, self.head = nn.Embedding(VOCABULARY, d), nn.Linear(d, layers * d), nn.Linear(d, VOCABULARY)
        self.blocks = nn.ModuleList(nn.Linear(d, d) for _ in range(layers))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(input_ids)
        conditions = self.film(x[:, 0]).view(-1, len(self.blocks), x.shape[-1])
        for k, block in enumerate(self.blocks):
            x = x + block(x * conditions[:, k, None]).relu()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Block(nn.Module):
    def __init__(self, d: int, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm, nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return result


class Shared(nn.Module):
    """One norm in all blocks; with `repeats`, the blocks run again, on other (virtual) stages too."""

    def __init__(self, d: int = 16, layers: int = 2, repeats: int = 1) -> None:
        super().__init__()
        norm, self.repeats = nn.LayerNorm(d), repeats
        self.emb, self.head = nn.Embedding(VOCABULARY, d), nn.Linear(d, VOCABULARY)
        self.blocks = nn.ModuleList(Block(d, norm) for _ in range(layers))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.emb(input_ids)
        for _ in range(self.repeats):
            for block in self.blocks:
                x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@cache
def _own(build: Callable[[], nn.Module]) -> Subject:
    torch.manual_seed(0)
    return subject(build(), FP64)


@cache
def _lora() -> Subject:
    made = programs.llama(FP64)
    model = copy.deepcopy(made.model)
    CHANGES["lora"](model.float())
    inputs = {name: value[:2] for name, value in made.batches[0].items()}
    return subject(model, FP64, layered(model.double(), {**inputs, "use_cache": False}))


ZERO3: dict[str, Any] = {"dp": 2, "micro_batch": 3, "zero": 3}
ONE, PP2, TP2, DP2 = dict[str, Any](), {"pp": 2}, {"tp": 2}, {"dp": 2, "micro_batch": 6}
TP4, DP4 = {"tp": 4}, {"dp": 4, "micro_batch": 3, "zero": 3}
DP4_TP2 = {"dp": 4, "tp": 2, "micro_batch": 3}
GPIPE = {"pp": 2, "micro_batch": 12, "schedule": "gpipe"}
VIRTUAL = {"pp": 2, "virtual_stages": 2, "schedule": "interleaved", "micro_batch": 3}
ALL = {"pp": 2, "dp": 2, "tp": 2, "micro_batch": 3, "zero": 2}


@dataclass(frozen=True)
class Case:
    """A model, the plan that it is saved under, which resumes it too, and two others."""

    make: Callable[[], Subject]
    saved: Mapping[str, Any]
    others: tuple[Mapping[str, Any], Mapping[str, Any]]
    quick: bool = False

    @property
    def plans(self) -> tuple[Mapping[str, Any], ...]:
        return self.saved, *self.others


CASES = {
    "fused": Case(lambda: family("gpt2", FP64), ZERO3, (TP2, PP2)),
    "fused, over fewer replicas": Case(
        lambda: family("gpt2", FP64), {"dp": 4, "tp": 2, "micro_batch": 3}, (TP4, DP4), quick=True
    ),
    "tied": Case(lambda: programs.gpt(FP64), {**TP2, **ZERO3}, (PP2, ONE)),
    "parts on several stages": Case(lambda: _own(Film), PP2, ({**PP2, **ZERO3}, TP2), quick=True),
    "frozen": Case(_lora, ZERO3, (TP2, PP2)),
    "shared": Case(lambda: _own(Shared), PP2, (TP2, ZERO3)),
    "repeated": Case(lambda: _own(lambda: Shared(repeats=2)), VIRTUAL, (PP2, ONE), quick=True),
    "uneven": Case(lambda: programs.parallel(FP64), ZERO3, (PP2, {"dp": 4, "micro_batch": 3, "zero": 3})),
    "opaque": Case(lambda: _own(OpaqueModel), ZERO3, (PP2, TP2), quick=True),
    "statistics": Case(lambda: family("resnet", FP64), DP2, (GPIPE, {**DP2, "zero": 3})),
    "experts": Case(lambda: family("mixtral", FP64), TP2, (ZERO3, PP2)),
    "encoder, decoder": Case(lambda: family("t5", FP64), PP2, (ALL, ONE)),
    "bidirectional": Case(lambda: family("bert", FP64), ALL, (PP2, TP2)),
}


@dataclass
class Run:
    """What one rank saw: all tensors before its steps, whole and by original name, and the losses of the steps."""

    model: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]
    losses: list[float] = field(default_factory=list)


def _seen(trainer: Trainer) -> Run:
    """Copies, put together by the trainer's own joining of shards and parts, not by the checkpoint's."""
    states: dict[str, dict[str, Tensor]] = {}
    for name in trainer.parameters:
        for key, value in trainer.optimizer.states(name).items():
            states.setdefault(key, {})[name] = _like(trainer.parameters[name], value)
    wholes = {
        key: {trainer.names.whole(n): x for n, x in values.items()} if key == "step" else trainer._whole(values)
        for key, values in states.items()
    }
    return copy.deepcopy(Run(trainer.state_dict(), wholes))


def _like(p: nn.Parameter, state: Tensor) -> Tensor:
    """A state laid out as its parameter is."""
    if not isinstance(p, DTensor) or not state.dim():
        return state
    return DTensor.from_local(state, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def _merged(runs: list[Run]) -> dict[str, Tensor]:
    """The tensors of all stages; what two ranks have is the same, or the test fails."""
    merged: dict[str, Tensor] = {}
    for run in runs:
        for group, tensors in {"model": run.model, **run.states}.items():
            for name, x in tensors.items():
                assert torch.equal(merged.setdefault(f"{group} {name}", x), x), name
    return merged


def _train(made: Subject, plan: Mapping[str, Any], folder: Path, saved: Path, resume: bool) -> list[Run]:
    """Save after BEFORE steps, or resume; then AFTER steps more."""
    chosen = made.plan(**plan)
    source, opaque = made.source(chosen), opaque_modules(made.program, made.model)

    def on_rank(rank: int) -> Run:
        program = load_source(source, opaque=opaque)
        program.__file__ = str(folder / "model.py")  # beside the initial weights
        trainer = Trainer(program, saved if resume else None)
        for batch in () if resume else made.batches[:BEFORE]:
            trainer.step(local_batch(trainer, batch))
        run = _seen(trainer)
        if not resume:
            trainer.save(saved)
        run.losses = [trainer.step(local_batch(trainer, batch)).loss for batch in made.batches[BEFORE:]]
        return run

    return run_ranks(chosen.mesh.world_size, on_rank, timeout=180)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=() if case.quick else pytest.mark.slow) for name, case in CASES.items()]
)
def test_resumed_is_never_stopped(case: Case, tmp_path: Path) -> None:
    made = case.make()
    save_tensors(tmp_path / "weights.pt", made.weights)  # initial values, which must not come back
    first = _train(made, case.saved, tmp_path, tmp_path / "saved", resume=False)
    expected = _merged(first)
    assert {f"model {name}" for name, _ in made.model.named_parameters()} <= expected.keys()
    assert any(key.startswith("exp_avg_sq ") for key in expected)
    for plan in case.plans:
        resumed = _train(made, plan, tmp_path, tmp_path / "saved", resume=True)
        found = _merged(resumed)
        assert found.keys() == expected.keys()
        assert not [key for key in found if not torch.equal(found[key], expected[key])]
        exact = 0.0 if plan is case.saved else 1e-9
        for run in resumed:
            assert run.losses == pytest.approx(first[0].losses, rel=exact, abs=0.0)


@pytest.mark.slow
def test_with_dropout_the_same_plan_goes_on_with_its_random_numbers(tmp_path: Path) -> None:
    """Streams differ over the stages and replicas, and shards draw apart; another plan draws others."""
    made = programs.gpt(FP64, layers=2, dropout=0.3)
    save_tensors(tmp_path / "weights.pt", made.weights)
    saved = tmp_path / "saved"
    first = _train(made, ALL, tmp_path, saved, resume=False)
    same = _train(made, ALL, tmp_path, saved, resume=True)
    assert [run.losses for run in same] == [run.losses for run in first]
    other = _train(made, PP2, tmp_path, saved, resume=True)
    assert other[0].losses[0] != first[0].losses[0]
