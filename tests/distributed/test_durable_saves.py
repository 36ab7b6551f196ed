"""Checkpoints when things go wrong, by a saved train.py on real processes: killed, full, damaged, NaN."""

from __future__ import annotations

import json
import math
import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import parallelize
from autopar.runtime.trainer import Trainer
from tests.distributed.handwritten import local_batch, make_batches, make_settings, original, program, weights_of
from tests.distributed.test_fp16 import spoil
from tests.harness import RankError, run_ranks

ROWS = """
import os, resource, signal, torch

class Rows:
    def __len__(self):
        return 400

    def __getitem__(self, i):
        with open(f"seen{os.environ['RANK']}", "a") as file:
            print(i, file=file)
        if i == int(os.environ.get("TERMINATE", -1)):
            os.kill(os.getpid(), signal.SIGTERM)
        if i == int(os.environ.get("BROKEN", -1)):
            raise RuntimeError("this sample is broken")
        if i == int(os.environ.get("FULL", -1)):
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return {"x": x, "y": x[:3] * (float("nan") if i == int(os.environ.get("SPOILT", -1)) else 1)}
"""
BASE = ("--data", "rows:Rows", "--no-shuffle", "--log", "log.jsonl")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2)) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(self.head(x), y)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("durable") / "program"
    torch.manual_seed(0)
    inputs = {"x": torch.zeros(2, 8), "y": torch.zeros(2, 3)}
    parallelize(Net(), 2, gpu="cpu", inputs=inputs, global_batch=4, micro_batch=2, dp=2, precision="fp32").save(folder)
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty folder to train in."""
    (tmp_path / "rows.py").write_text(ROWS)
    return tmp_path


def train(place: Path, program: Path, *arguments: str, before: Callable[[int], None] | None = None, **env: Any) -> None:
    """train.py on two forked processes, in `place`; `before` is called on each."""

    def on_rank(rank: int) -> None:
        os.chdir(place)
        sys.path[:0] = [str(program), str(place)]
        sys.argv = ["train.py", *BASE, *arguments]
        os.environ.update({name: str(value) for name, value in env.items()})
        if before:
            before(rank)
        runpy.run_path(str(program / "train.py"), run_name="__main__")

    run_ranks(2, on_rank, timeout=120)


def losses(place: Path) -> list[float]:
    lines = [json.loads(line) for line in (place / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def seen(place: Path) -> list[int]:
    """The samples of all ranks."""
    return sorted(int(line) for rank in range(2) for line in (place / f"seen{rank}").read_text().split())


def test_every_n_steps_and_the_latest_k_then_on_bit_for_bit(saved: Path, place: Path) -> None:
    """With dropout: the streams of random numbers go on, too, in fresh processes."""
    train(place, saved, "--steps", "7", "--seed", "3", "--save", "a", "--save-every", "2", "--keep", "2")
    assert names(place / "a") == {"step-6", "step-7"}
    straight = losses(place)
    shutil.rmtree(place / "a" / "step-7")
    (place / "log.jsonl").unlink()
    train(place, saved, "--steps", "1", "--init", "a")
    assert losses(place) == straight[6:]
    train(place, saved, "--steps", "4", "--seed", "3", "--save", "b")
    train(place, saved, "--steps", "3", "--init", "b", "--save", "b", "--keep", "1")
    assert losses(place)[1:] == straight
    assert names(place / "b") == {"step-7"}
    with pytest.raises(RankError, match="--save b has step-7, and this run begins at step 0: go on .* by --init b"):
        train(place, saved, "--steps", "1", "--save", "b")


def test_sigterm_of_one_rank_saves_and_ends_well(saved: Path, place: Path) -> None:
    """Sample 10 is the third of step 2, which rank 1 reads; step 2 is done, saved, and the last."""
    train(place, saved, "--steps", "50", "--save", "saved", TERMINATE=10)
    assert names(place / "saved") == {"step-3"} and len(losses(place)) == 3
    train(place, saved, "--steps", "1", "--init", "saved", "--save", "saved")
    assert seen(place) == list(range(16))


def test_sigterm_while_a_peer_fails_saves_nothing(saved: Path, place: Path) -> None:
    """Rank 0 reads sample 8, rank 1 sample 10, of the same step."""
    with pytest.raises(RankError, match="RuntimeError: this sample is broken"):
        train(place, saved, "--steps", "50", "--save", "saved", TERMINATE=8, BROKEN=10)
    assert names(place / "saved") == set()


def test_sigterm_under_torchrun(saved: Path, place: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--", str(saved / "train.py")]
    environment = {**os.environ, "TERMINATE": "10", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launch, *BASE, "--steps", "50", "--save", "saved"]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert names(place / "saved") == {"step-3"}


def test_another_global_batch_goes_on_at_the_right_sample(saved: Path, place: Path) -> None:
    train(place, saved, "--steps", "3", "--save", "saved")
    other = place / "other"
    shutil.copytree(saved, other)
    text = (other / "model.py").read_text()
    assert text.count("global_batch=4") == 1
    (other / "model.py").write_text(text.replace("global_batch=4", "global_batch=8"))
    train(place, other, "--steps", "2", "--init", "saved", "--save", "saved")
    assert seen(place) == list(range(3 * 4 + 2 * 8))
    assert json.loads((place / "saved" / "step-5" / "manifest.json").read_text())["samples"] == 28


def test_saved_into_the_program_s_own_folder(saved: Path, place: Path) -> None:
    """It begins anew unless it is asked to go on."""
    shutil.copytree(saved, place / "own")
    for arguments in ((), ("--save", "own"), ("--init", "own")):
        train(place, place / "own", "--steps", "1", *arguments)
    steps = [json.loads(line)["step"] for line in (place / "log.jsonl").read_text().splitlines()]
    assert steps == [0, 0, 1]


def _kill_at_sync(number: int, of_rank: int) -> Callable[[int], None]:
    """Have a rank killed as it puts the `number`-th thing of a save on the disk."""

    def before(rank: int) -> None:
        counted, sync = iter(range(1, 100)), os.fsync

        def fsync(fd: Any) -> None:
            if next(counted) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            sync(fd)

        if rank == of_rank:
            os.fsync = fsync

    return before


@pytest.mark.parametrize(
    ("number", "of_rank"),
    [pytest.param(1, 1, id="data"), pytest.param(2, 0, id="list"), pytest.param(3, 0, id="manifest")],
)
def test_killed_in_a_save(number: int, of_rank: int, saved: Path, place: Path) -> None:
    train(place, saved, "--steps", "2", "--save", "saved")
    with pytest.raises(RankError, match="SIGKILL"):
        train(place, saved, "--steps", "1", "--init", "saved", "--save", "saved", before=_kill_at_sync(number, of_rank))
    if of_rank == 1:  # rank 0 may have had the time to clear up
        assert names(place / "saved") - {"step-3.partial"} == {"step-2"}
    else:
        assert names(place / "saved") == {"step-2", "step-3.partial"}
        with pytest.raises(RankError, match="step-3.partial is not whole"):
            train(place, saved, "--steps", "1", "--init", "saved/step-3.partial")
    train(place, saved, "--steps", "1", "--init", "saved", "--save", "saved")
    assert names(place / "saved") == {"step-2", "step-3"}


def test_a_full_disk(saved: Path, place: Path) -> None:
    """Rank 1 can write no file of more than 2,000 bytes: both say so, and what was saved stays."""
    train(place, saved, "--steps", "2", "--save", "saved")
    words = r"OSError: .*step-3 was not saved \(.*\); what .*saved had before it still has"
    with pytest.raises(RankError, match=words):
        train(place, saved, "--steps", "1", "--init", "saved", "--save", "saved", FULL=10)
    assert names(place / "saved") == {"step-2"}


def test_a_run_that_meets_nan_saves_nothing_over(saved: Path, place: Path) -> None:
    """Sample 9 is in step 2."""
    with pytest.raises(RankError, match=r"FloatingPointError: step 2: the loss is nan .* of blocks.0.0.weight, "):
        train(place, saved, "--steps", "5", "--save", "saved", "--save-every", "1", "--keep", "1", SPOILT=9)
    assert names(place / "saved") == {"step-2"}
    train(place, saved, "--steps", "1", "--init", "saved")


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
def test_a_gradient_that_is_not_finite_is_named_and_changes_nothing(precision: str, tmp_path: Path) -> None:
    """In rank 1's part of one part of one parameter, with a finite loss."""
    model, batches = original(fused=True), make_batches(2)

    def on_rank(rank: int) -> None:
        settings = make_settings(dp=2, zero=2, precision=precision)
        trainer = Trainer(program(settings, fused=True), weights_of(model), device="cpu")
        spoil(trainer, lambda: rank == 1 and trainer.steps == 1, "h.1.attn.k.weight")
        trainer.step(local_batch(batches[0], trainer.settings, rank))
        before = {name: x.clone() for name, x in trainer.state_dict().items()}
        with pytest.raises(FloatingPointError, match="step 1: .* gradient of h.1.attn.qkv.weight is not finite"):
            trainer.step(local_batch(batches[1], trainer.settings, rank))
        assert all(torch.equal(x, before[name]) for name, x in trainer.state_dict().items())
        with torch.no_grad():
            next(iter(trainer.parameters.values())).fill_(math.inf)
        with pytest.raises(FloatingPointError, match="after 1 steps .* is not finite: nothing was saved"):
            trainer.save(tmp_path)
        assert not list(tmp_path.iterdir())

    run_ranks(2, on_rank)


def test_a_truncated_file_and_one_of_another_step_are_refused_by_train(saved: Path, place: Path) -> None:
    train(place, saved, "--steps", "3", "--save", "saved", "--save-every", "1")
    mixed, truncated = place / "saved" / "step-3", place / "saved" / "step-2"
    shutil.copy(truncated / "__1_0.distcp", mixed)
    for folder, words in ((mixed, "its hash is not the manifest's"), (truncated, r"\d+ bytes of \d+")):
        if folder is truncated:
            with (folder / "__0_0.distcp").open("r+b") as file:
                file.truncate(1000)
        with pytest.raises(RankError, match=rf"{folder.name}/__\d_0.distcp is damaged, or of another save: {words}"):
            train(place, saved, "--steps", "1", "--init", f"saved/{folder.name}")
    (place / "log.jsonl").unlink()
    train(place, saved, "--steps", "1", "--init", "saved")
    assert json.loads((place / "log.jsonl").read_text())["step"] == 1
