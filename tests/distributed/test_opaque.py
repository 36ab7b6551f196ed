"""Modules that cannot be traced run as their author wrote them, and the program trains as the original does."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import PlanError
from autopar.search.layouts import MEGATRON_SP
from tests.distributed.opaque_models import (
    BatchSquash,
    MarkedModel,
    OpaqueModel,
    PerSample,
    Scan,
    Selected,
    Squash,
    StraightThrough,
)
from tests.distributed.programs import Subject, assert_parity, batches, subject

PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2, "micro_batch": 3},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "zero3": {"dp": 2, "micro_batch": 3, "zero": 3},
    "zero3-tp2-pp2-recompute": {
        "dp": 2, "tp": 2, "pp": 2, "micro_batch": 3, "zero": 3, "recompute": "all", "layout": MEGATRON_SP,
    },
}  # fmt: skip


KINDS: dict[str, type[nn.Module]] = {
    k.__name__: k for k in (BatchSquash, PerSample, Scan, Selected, Squash, StraightThrough)
}


@cache
def made(kind: str) -> Subject:
    torch.manual_seed(0)
    return subject(OpaqueModel(KINDS[kind]), torch.float64)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("plan", PLANS)
def test_a_branch_on_values_inside_a_module(plan: str) -> None:
    """Which parameters a rank reads depends on its samples: the reductions of gradients must not."""
    assert_parity(made("Squash"), made("Squash").plan(**PLANS[plan]))


def marked(reads: bool) -> Subject:
    """One sample has the flag in the first and the third step, none in the others."""
    torch.manual_seed(0)
    data = batches()
    for step, batch in enumerate(data):
        batch["input_ids"][batch["input_ids"] == 0] = 1
        if step in (0, 2):
            batch["input_ids"][9, 3] = 0  # its labels are not all padding
    return subject(MarkedModel(reads=reads), torch.float64, data=data)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize(
    ("plan", "reads"),
    [("dp2", False), ("dp2", True), ("zero3", False), ("zero3", True), ("zero3-tp2-pp2-recompute", False)],
)
def test_a_parameter_that_a_step_leaves_out_does_not_decay(plan: str, reads: bool) -> None:
    """The original has no gradient of it, so that AdamW leaves it and its state alone."""
    left_out = marked(reads)
    before, after = left_out.weights, left_out.reference.weights
    assert torch.equal(before["blocks.0.inner.never.weight"], after["blocks.0.inner.never.weight"])
    assert not torch.equal(before["blocks.0.inner.rare.weight"], after["blocks.0.inner.rare.weight"])
    assert ('        "inner.rare.weight",' in left_out.source(left_out.plan())) is not reads
    assert_parity(left_out, left_out.plan(**PLANS[plan]))


def test_verify_finds_that_parameters_left_out_are_equal() -> None:
    ids = torch.zeros(2, 16, dtype=torch.long)
    result = autopar.parallelize(
        MarkedModel(), 2, gpu="cpu", inputs={"input_ids": ids, "labels": ids}, global_batch=4, dp=2
    )
    assert "gradient of zero" not in str(result)
    assert result.verify(steps=3).holds


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("kind", ["StraightThrough", "Selected", "Scan", "PerSample"])
@pytest.mark.parametrize("plan", ["dp2", "zero3-tp2-pp2-recompute"])
def test_t12_what_a_trace_would_record_wrongly(kind: str, plan: str) -> None:
    """The backward of a custom autograd.Function; sizes that depend on values; a loop over tokens, at one length."""
    assert made(kind).program.opaque.keys() == {"Tripled" if kind == "StraightThrough" else "inner"}
    assert_parity(made(kind), made(kind).plan(**PLANS[plan]))


def test_a_module_that_couples_samples_is_refused_on_the_data_axis_by_name() -> None:
    coupled = made("BatchSquash")
    assert_parity(coupled, coupled.plan(tp=2, micro_batch=12))
    for plan in (coupled.plan(dp=2, micro_batch=6), coupled.plan(micro_batch=4)):
        with pytest.raises(PlanError, match=r"inner.*couples samples"):
            coupled.source(plan)


def test_a_module_kept_whole_that_layers_share_is_refused_by_name() -> None:
    model: Any = OpaqueModel(Squash)
    for block in model.blocks:
        block.inner = model.blocks[0].inner
    shared = subject(model, torch.float64)
    with pytest.raises(PlanError, match="inner cannot be traced, and several layers share it"):
        shared.source(shared.plan(dp=2, micro_batch=6))


def test_a_saved_program_finds_its_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_modules.py").write_text(
        "from tests.distributed.opaque_models import Squash\n\n\nclass Mine(Squash): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    kind = importlib.import_module("my_modules").Mine
    ids = torch.zeros(2, 16, dtype=torch.long)
    torch.manual_seed(0)
    model = OpaqueModel(kind, layers=2, ids=256)
    result = autopar.parallelize(model, 1, gpu="cpu", inputs={"input_ids": ids, "labels": ids}, global_batch=4)
    assert "opaque: inner (Mine) cannot be traced" in str(result)
    folder = result.save(tmp_path / "program")
    assert "opaque.pt" in (folder / "README.md").read_text()
    ran = _train(folder, PYTHONPATH=str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    ran = _train(folder)
    assert ran.returncode and "put their source on PYTHONPATH" in ran.stderr


def _train(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Two steps of the saved program, as torchrun's only process."""
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29571"}
    return subprocess.run(
        [sys.executable, "train.py", "--steps", "2"], cwd=folder, env={**os.environ, **one, **environment},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
