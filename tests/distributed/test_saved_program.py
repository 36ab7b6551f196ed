"""The saved folder by torchrun, as users run it: with nothing but torch; logged, saved, resumed, failing loudly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import MixtralConfig, MixtralForCausalLM

from autopar.api import parallelize
from autopar.cli import main
from examples.gpt import GPT, GPTConfig

SEQUENCE, BATCH = 16, 4
LR = ("--lr", "0.01")
REPOSITORY = Path(__file__).parents[2]
LOG_KEYS = {
    "step", "loss", "grad_norm", "tokens_per_s_per_gpu", "mfu", "memory_bytes", "measured_step_s", "data_s",
    "predicted_step_s",
}  # fmt: skip
# Python runs it first of all: what a saved program must not need is not there.
HIDE = """
import sys

HIDDEN = {"autopar", "transformers", "safetensors", "yaml", "scipy", "tabulate", "examples", "tests"}


class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        # torch itself needs sympy; the program must not.
        if package in HIDDEN or package == "sympy" and not installed(sys._getframe(1)):
            return None
        return self.finder.find_spec(name, path, target)


def installed(frame):
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and "site-packages" in frame.f_code.co_filename


sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def model(**changes: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(GPTConfig(**{"n_layer": 2, "d_model": 32, "block_size": SEQUENCE, **changes}))


def save(folder: Path, **pins: Any) -> Path:
    ids = torch.zeros(2, SEQUENCE, dtype=torch.long)
    options: dict[str, Any] = {"gpu": "h100-sxm-80gb", "precision": "fp32", "global_batch": BATCH, "dp": 1, **pins}
    return parallelize(model(), 2, inputs={"input_ids": ids, "labels": ids}, **options).save(folder)


def environment(first: Path) -> dict[str, str]:
    """Of a run: one thread a rank, no GPU, and `first` in front of the path."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    return {
        **clean,
        "PYTHONPATH": str(first), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip


def hide(folder: Path) -> dict[str, str]:
    """The environment of a run that finds nothing but torch."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HIDE)
    for name in ("autopar", "transformers", "sympy"):
        found = subprocess.run([sys.executable, "-c", f"import {name}"], env=environment(folder), capture_output=True)
        assert f"No module named '{name}'".encode() in found.stderr
    return environment(folder)


def torchrun(program: Path, *arguments: str, cwd: Path) -> None:
    """As README.md says."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--", str(program / "train.py")]
    command = [sys.executable, *launch, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment(cwd), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    """What any torch.distributed.checkpoint reader finds under `model`, without autopar."""
    target = folder.with_suffix(".pt")
    dcp_to_torch_save(folder, target)
    weights: dict[str, torch.Tensor] = torch.load(target, weights_only=False)["model"]
    return weights


def test_trains_with_nothing_but_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`autopar run`: a line of progress and of log a step on Python's own source, and weights under their own names."""
    program = save(tmp_path / "program", tp=2, recompute="full")
    monkeypatch.chdir(tmp_path)
    for name, value in hide(tmp_path / "hidden").items():
        monkeypatch.setenv(name, value)
    assert main(["run", str(program), "--", *LR, "--steps", "3", "--log", "log.jsonl", "--save", "saved"]) == 0
    assert "step 2 · loss" in capfd.readouterr().out
    lines = log(tmp_path / "log.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(set(line) == LOG_KEYS for line in lines)
    assert all(line["memory_bytes"] is None for line in lines)  # on a CPU, without --measure-memory
    assert all(line["predicted_step_s"] > 0 and line["mfu"] > 0 for line in lines)
    for line in lines:
        assert 0 < line["data_s"] < line["measured_step_s"], "to load the samples is part of a step"
        tokens_per_s = line["tokens_per_s_per_gpu"] * 2
        assert tokens_per_s == pytest.approx(BATCH * SEQUENCE / line["measured_step_s"])
    assert lines[2]["loss"] < lines[0]["loss"] < 6

    # R4: saved with recompute on; the original model, which knows of none, takes them as they are.
    original = model()
    weights = saved_weights(tmp_path / "saved" / "step-3")
    assert set(weights) == {name for name, _ in original.named_parameters()}
    missing, unexpected = original.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}  # tied: kept under one name
    trained, untrained = original.state_dict(), model().state_dict()
    assert not any(torch.equal(trained[name], untrained[name]) for name in weights)


@pytest.mark.slow
def test_resumes_under_another_plan(tmp_path: Path) -> None:
    """3 steps at tp2 with recompute, then 2 at pp2 without, equal 5 at a stretch."""
    first, then = (
        save(tmp_path / "first", tp=2, recompute="full"),
        save(tmp_path / "then", pp=2, tp=1, recompute="none"),
    )
    torchrun(first, *LR, "--steps", "3", "--log", "resumed.jsonl", "--save", "saved", cwd=tmp_path)
    torchrun(then, *LR, "--steps", "2", "--log", "resumed.jsonl", "--init", "saved", cwd=tmp_path)
    torchrun(then, *LR, "--steps", "5", "--log", "straight.jsonl", cwd=tmp_path)
    resumed, straight = log(tmp_path / "resumed.jsonl"), log(tmp_path / "straight.jsonl")
    assert [line["step"] for line in resumed] == [line["step"] for line in straight] == [0, 1, 2, 3, 4]
    for ours, theirs in zip(resumed, straight, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-4)


DATA = """
import os
import torch


class Broken:
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if os.environ["RANK"] == "1" and index >= 4:  # in the second step
            raise RuntimeError("this sample is broken")
        ids = torch.arange(16)
        return {"input_ids": ids, "labels": ids}
"""


def test_a_rank_that_raises_ends_the_job(tmp_path: Path) -> None:
    """L1: within 15 s, with its traceback and a code that is not 0; by `autopar run`, in the user's folder."""
    program = save(tmp_path / "program", dp=2, tp=1)
    (tmp_path / "broken.py").write_text(DATA)
    arguments = ["run", str(program), "--", "--data", "broken:Broken", "--no-shuffle", "--log", "log.jsonl"]
    process = subprocess.Popen(
        [sys.executable, "-m", "autopar.cli", *arguments],
        cwd=tmp_path, env=environment(REPOSITORY), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        lines, first_step_s = [], 0.0
        for line in process.stdout:
            lines.append(line)
            first_step_s = first_step_s or (time.monotonic() if line.startswith("step 0") else 0.0)
        code = process.wait(timeout=60)
    finally:
        process.kill()
    printed = "".join(lines)
    assert code != 0
    assert first_step_s, printed
    assert time.monotonic() - first_step_s < 15
    assert "RuntimeError: this sample is broken" in printed
    assert "broken.py" in printed and "Traceback" in printed
    assert len(log(tmp_path / "log.jsonl")) == 1


class Normed(nn.Module):
    """Batch norm over the tokens of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm, self.head = nn.Embedding(256, 8), nn.BatchNorm1d(8), nn.Linear(8, 256)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.emb(input_ids).transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def experts() -> nn.Module:
    config = MixtralConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=SEQUENCE, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config)


SAMPLES = """
import torch
def build():
    return [{"input_ids": torch.randint(256, (16,)), "labels": torch.randint(256, (16,))} for _ in range(8)]
"""
# Technique → the model, its plan, and the modules of the runtime that it alone needs.
TECHNIQUES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], set[str]]] = {
    "sequence over ranks": (model, {"cp": 2}, {"attention", "flash", "tiles", "collectives"}),
    "chunked loss, offload": (model, {"dp": 2, "zero": 3, "offload": True, "loss_chunks": 4}, {"linear_loss"}),
    "batch norm": (Normed, {"dp": 2, "batch_norm": "synchronise"}, {"norm"}),
    "experts": (experts, {"tp": 2}, {"experts", "collectives", "loss"}),
}


@pytest.mark.parametrize(
    "technique", [pytest.param(name, marks=() if name == "experts" else pytest.mark.slow) for name in TECHNIQUES]
)
def test_each_technique_runs_from_its_folder_alone(technique: str, tmp_path: Path) -> None:
    """With the modules of the runtime that are in it, the standard library and torch; saved and resumed."""
    build, options, needed = TECHNIQUES[technique]
    ids = torch.zeros(2, SEQUENCE, dtype=torch.long)
    pins: dict[str, Any] = {"precision": "fp32", "global_batch": BATCH, "dp": 1, "tp": 1, "pp": 1, **options}
    chunks = pins.pop("loss_chunks", 1)
    result = parallelize(build(), 2, gpu="h100-sxm-80gb", inputs={"input_ids": ids, "labels": ids}, **pins)
    program = result.save(tmp_path / "program", result.plan.changed(loss_chunks=chunks))
    special = set().union(*(modules for _, _, modules in TECHNIQUES.values())) - {"collectives", "loss"}
    copied = {path.stem for path in (program / "runtime").iterdir()}
    assert needed <= copied and copied & special == needed & special
    environment = hide(tmp_path / "hidden")
    (tmp_path / "samples.py").write_text(SAMPLES)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--", str(program / "train.py")]
    launch += ["--data", "samples:build"]
    for start in ([], ["--init", "saved"]):
        command = [sys.executable, *launch, "--steps", "2", "--log", "log.jsonl", "--save", "saved", *start]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
    assert [line["step"] for line in log(tmp_path / "log.jsonl")] == [0, 1, 2, 3]
