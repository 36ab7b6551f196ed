"""The trainer as a user of an emitted program meets it: clipping, ties, dropout, resuming, 16 bit, failing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.runtime.memory import LiveStorage
from autopar.runtime.settings import Settings
from autopar.runtime.trainer import StepResult, Trainer
from tests.distributed.handwritten import (
    local_batch,
    make_batches,
    make_settings,
    original,
    program,
    weights_of,
)
from tests.harness import assert_parity, reference_run, run_ranks

ROOT = Path(__file__).resolve().parents[2]


def train(trainer: Trainer, batches: list[dict[str, Tensor]]) -> list[StepResult]:
    replica = trainer.mesh.rank("dp")
    return [trainer.step(local_batch(batch, trainer.settings, replica)) for batch in batches]


def test_clipping_takes_the_global_norm_with_tied_weights_once() -> None:
    """Z1, P1: dp2 · tp2 · pp2, ZeRO-2, tied embedding and head on different stages, max_norm 0.1."""
    batches, model = make_batches(5), original(tied=True)
    reference = reference_run(model, batches, torch.optim.AdamW, clip=0.1)
    settings = make_settings(pp=2, dp=2, tp=2, zero=2, micro_batches=2)

    def rank_main(rank: int) -> dict[str, Tensor]:
        trainer = Trainer(program(settings, tied=True), weights_of(model), clip=0.1, device="cpu")
        for result, loss, norm in zip(train(trainer, batches), reference.losses, reference.norms, strict=True):
            assert norm > 0.1
            assert result.loss == pytest.approx(loss, rel=1e-9)
            assert result.grad_norm == pytest.approx(norm, rel=1e-9)
        state = trainer.state_dict()
        assert_parity(state, {name: reference.weights[name] for name in state}, 1e-9)
        return state

    states = run_ranks(8, rank_main, timeout=90)
    assert torch.equal(states[0]["wte.weight"], states[-1]["wte.weight"])


@pytest.mark.parametrize(
    "name, options", [("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adagrad", {"lr": 0.01, "eps": 1e-3})]
)
def test_any_elementwise_optimizer_with_groups_by_name(name: str, options: dict[str, Any]) -> None:
    batches, model = make_batches(3), original()
    names = [n for n, p in model.named_parameters() if p.dim() < 2]
    settings = make_settings(dp=2, tp=2, zero=3, optimizer=name, optimizer_kwargs={**options, "weight_decay": 0.1})

    def make(parameters: Any) -> torch.optim.Optimizer:
        everything = list(parameters)
        small = [p for p in everything if p.dim() < 2]
        groups = [{"params": small, "weight_decay": 0.0}, {"params": [p for p in everything if p.dim() > 1]}]
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(groups, **settings.optimizer_kwargs)
        return optimizer

    reference = reference_run(model, batches, make)

    def rank_main(rank: int) -> None:
        module: Any = program(settings)
        module.PARAMETER_GROUPS = ((names, {"weight_decay": 0.0}),)
        trainer = Trainer(module, weights_of(model), device="cpu")
        train(trainer, batches)
        assert_parity(trainer.state_dict(), reference.weights, 1e-9)

    run_ranks(4, rank_main)


def test_checkpoints_resume_under_another_plan(tmp_path: Path) -> None:
    """Saved by tp2 · dp2, resumed by pp2 and by one process: the same as never having stopped."""
    batches, model = make_batches(4), original(tied=True, fused=True)
    reference = reference_run(model, batches, torch.optim.AdamW)

    def save(rank: int) -> None:
        settings = make_settings(dp=2, tp=2, zero=3)
        trainer = Trainer(program(settings, tied=True, fused=True), weights_of(model), device="cpu")
        train(trainer, batches[:2])
        trainer.save(tmp_path / "saved")

    def resume(rank: int, settings: Settings, folder: Path, start: int, stop: int) -> None:
        module = program(settings, tied=True, fused=True, recompute=(0, 1))
        module.__file__ = str(tmp_path / "model.py")
        trainer = Trainer(module, folder, device="cpu")
        assert trainer.steps == start
        train(trainer, batches[start:stop])
        trainer.save(tmp_path / f"saved{stop}")
        if stop == len(batches):
            state = trainer.state_dict()
            assert_parity(state, {name: reference.weights[name] for name in state}, 1e-9)

    torch.save(dict(original().named_buffers()), tmp_path / "weights.pt")  # as in a saved program
    run_ranks(4, save)
    run_ranks(2, resume, make_settings(pp=2, micro_batches=2), tmp_path / "saved", 2, 3)
    run_ranks(4, resume, make_settings(dp=2, tp=2, zero=2), tmp_path / "saved3", 3, 4)
    run_ranks(1, resume, make_settings(), tmp_path / "saved3", 3, 4)
    saved = {key for key in _keys(tmp_path / "saved" / "step-2") if key.startswith("model.")}
    names = {name for name, _ in model.named_parameters()}
    assert saved == {f"model.{name}" for name in names}


def test_a_checkpoint_of_another_model_is_refused_and_of_another_optimizer_begins_its_states(tmp_path: Path) -> None:
    batch, model, saved = make_batches(2), original(), tmp_path / "saved"
    torch.save(dict(model.named_buffers()), tmp_path / "weights.pt")

    def resumed(module: Any) -> Trainer:
        module.__file__ = str(tmp_path / "model.py")
        return Trainer(module, saved, device="cpu")

    def rank_main(rank: int) -> None:
        trainer = Trainer(program(make_settings(dp=2, zero=3)), weights_of(model), device="cpu")
        train(trainer, batch[:1])
        trainer.save(saved)
        for other, words in (
            (program(make_settings(dp=2), vocabulary=37), "'model.lm_head.weight' has shape .*, and in the checkpoint"),
            (
                _without_norm(program(make_settings(dp=2))),
                "the checkpoint has model.ln_f.bias, and this program has not: another model's",
            ),
        ):
            with pytest.raises(ValueError, match=words):
                resumed(other)
        settings = make_settings(dp=2, optimizer="SGD", optimizer_kwargs={"lr": 0.1, "momentum": 0.9})
        anew = resumed(program(settings))
        assert anew.steps == 1 and not any(map(anew.optimizer.states, anew.parameters))
        train(anew, batch[1:])

    run_ranks(2, rank_main)


def _without_norm(module: Any) -> Any:
    """The program with its last norm's bias a constant."""
    build = module.Model

    def model(stage: int) -> Any:
        made = build(stage)
        del made.ln_f.bias
        made.ln_f.bias = torch.zeros(())
        return made

    module.Model = model
    return module


def _keys(folder: Path) -> set[str]:
    from torch.distributed.checkpoint import FileSystemReader  # type: ignore[attr-defined]

    return set(FileSystemReader(folder).read_metadata().state_dict_metadata)


def test_recorded_initialisation_is_the_same_under_every_plan(tmp_path: Path) -> None:
    recipe = [["normal_", 0.0, 0.02], ["add_", 1.0]]
    names = {name for name, _ in original(fused=True).named_parameters()}
    (tmp_path / "init.json").write_text(str({n: recipe for n in names}).replace("'", '"'))
    torch.save(dict(original().named_buffers()), tmp_path / "weights.pt")

    def rank_main(rank: int, settings: Settings, seed: int) -> dict[str, Tensor]:
        module = program(settings, fused=True)
        module.__file__ = str(tmp_path / "model.py")
        return Trainer(module, seed=seed, device="cpu").state_dict()

    (one,) = run_ranks(1, rank_main, make_settings(), 3)
    four = run_ranks(4, rank_main, make_settings(pp=2, tp=2), 3)
    assert {**four[0], **four[3]}.keys() == one.keys() == names
    assert all(torch.equal(value, one[name]) for state in four for name, value in state.items())
    (other,) = run_ranks(1, rank_main, make_settings(), 4)
    assert not torch.equal(other["wte.weight"], one["wte.weight"])


def test_dropout_with_recompute_gives_the_same_gradients_bit_for_bit() -> None:
    """R1, with masks that differ over tp shards."""
    batch, weights = make_batches(1), weights_of(original())

    def rank_main(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        results = []
        for recompute in ((), (0, 1)):
            settings = make_settings(dp=2, tp=2, zero=1, micro_batches=2)
            trainer = Trainer(program(settings, recompute=recompute, p=0.3), weights, device="cpu")
            train(trainer, batch)
            results.append(trainer.gradients())
        return results[0], results[1]

    for without, with_recompute in run_ranks(4, rank_main):
        assert all(torch.equal(without[name], with_recompute[name]) for name in without)


def test_sixteen_bit_programs_keep_32_bit_masters() -> None:
    """N3: bf16 with steps far below its resolution still moves the weights; every plan starts from the same."""
    batches, model = make_batches(3), original().float()
    weights = weights_of(model)

    def rank_main(rank: int, settings: Settings) -> list[float]:
        trainer = Trainer(program(settings), weights, lr=1e-6, device="cpu")
        losses = [result.loss for result in train(trainer, batches)]
        moved = trainer.state_dict()
        assert all(p.dtype is torch.float32 for p in trainer.parameters.values())
        assert all(0 < float((moved[n] - weights[n]).abs().max()) < 1e-4 for n in moved)
        return losses

    reference = reference_run(model, batches, lambda p: torch.optim.AdamW(p, lr=1e-6))
    cases: list[dict[str, int]] = [{}, *({"dp": 2, "zero": zero} for zero in range(4))]
    cases += [{"pp": 2, "dp": 2, "tp": 2, "zero": zero} for zero in (0, 3)]
    for case in cases:
        settings = make_settings(**case, precision="bf16", micro_batches=2)
        for losses in run_ranks(settings.world_size, rank_main, settings):
            assert losses == pytest.approx(reference.losses, rel=1e-2)


def test_live_storage_between_micro_batches_is_the_table() -> None:
    """Bytes over those at rest, before the second of four micro-batches: what each ZeRO stage keeps."""
    batch, weights = make_batches(2), weights_of(original())

    def rank_main(rank: int, zero: int) -> int:
        with LiveStorage() as storage:
            settings = make_settings(dp=2, zero=zero, micro_batches=4)
            trainer = Trainer(program(settings), weights, device="cpu")
            train(trainer, batch[:1])
            trainer.optimizer.zero_grad()
            at_rest, seen = storage.live(), []
            trainer.model.register_forward_pre_hook(lambda *_: seen.append(storage.live()), prepend=True)
            train(trainer, batch[1:])
            return int(seen[1] - at_rest)

    whole = sum(p.numel() for p in original().parameters()) * 8
    expected = {0: whole, 1: 2 * whole, 2: 1.5 * whole, 3: 0.5 * whole}
    slack = 2000 + (2 * 32 * 16 + 2 * 16) * 8  # fully_shard may keep the last gather's buffer until the next
    for zero, size in expected.items():
        for kept in run_ranks(2, rank_main, zero):
            assert size <= kept <= size + slack, f"zero={zero}: {kept / whole:.2f} of the parameters"


def test_a_launch_of_another_world_size_names_both_and_the_way_out() -> None:
    def rank_main(rank: int) -> None:
        with pytest.raises(ValueError, match=r"planned for 4 processes .* launched with 2: run `torchrun .* 4"):
            Trainer(program(make_settings(dp=4)), {}, device="cpu")

    run_ranks(2, rank_main)


MODEL = """
import time

import handwritten
_program = handwritten.program(handwritten.make_settings(dp=2), tied=True)
globals().update({name: value for name, value in vars(_program).items() if not name.startswith("__")})
class Broken:
    def __len__(self): return 99
    def __getitem__(self, index):
        if index == 20: raise RuntimeError(f"sample 20 is broken at {time.time()}s")
        return {"input_ids": [1, 2, 3, 4, 5, 6], "labels": [2, 3, 4, 5, 6, 7]}
"""


def test_a_rank_that_raises_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "autopar" / "runtime", tmp_path / "runtime")
    shutil.copy(ROOT / "autopar" / "emit" / "templates" / "train.py", tmp_path)
    handwritten = (ROOT / "tests" / "distributed" / "handwritten.py").read_text()
    (tmp_path / "handwritten.py").write_text(handwritten.replace("autopar.runtime", "runtime"))
    (tmp_path / "model.py").write_text(MODEL)
    torch.save(weights_of(original(tied=True)), tmp_path / "weights.pt")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--data", "model:Broken", "--no-shuffle", "--steps", "50"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    raised = re.search(r"RuntimeError: sample 20 is broken at ([\d.]+)s", done.stderr)
    assert raised and time.time() - float(raised[1]) < 15
    assert "step 1" in done.stdout
