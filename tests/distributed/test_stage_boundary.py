"""P11: a stage that sends other tensors than the next one was planned to receive: both say so, at once."""

from __future__ import annotations

import time

import pytest
import torch

from autopar.emit.source import load_source
from autopar.runtime.trainer import Trainer
from tests.distributed.programs import batches, gpt
from tests.harness import run_ranks

EDITS = {
    "a width": (
        "        return x\n\n    def _prologue",
        "        return x[..., :-1]\n\n    def _prologue",
        "[2, 16, 31]",
    ),
    "a dtype": ("        return x\n\n    def _prologue", "        return x.float()\n\n    def _prologue", "float32"),
}


def _train(rank: int, source: str, weights: dict[str, torch.Tensor]) -> str:
    trainer = Trainer(load_source(source), weights, device="cpu")
    batch = {name: value[: trainer.settings.global_batch] for name, value in batches(1)[0].items()}
    try:
        trainer.step(batch)
    except Exception as error:  # noqa: BLE001 - torch wraps what a stage raises
        return f"{error} {error.__cause__}"
    return ""


@pytest.mark.parametrize(("before", "after", "found"), EDITS.values(), ids=EDITS.keys())
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_p11_both_sides_of_a_boundary_raise(before: str, after: str, found: str, schedule: str) -> None:
    model = gpt(torch.float64)
    source = model.source(model.plan(pp=2, micro_batch=2, schedule=schedule))
    assert source.count(before) == 1
    began = time.monotonic()
    said = run_ranks(2, _train, source.replace(before, after), model.weights)
    assert time.monotonic() - began < 60
    for text in said:
        assert "stage 0 sends [2, 16, 3" in text and "but stage 1 was planned to receive [2, 16, 32] float64" in text
        assert found in text
