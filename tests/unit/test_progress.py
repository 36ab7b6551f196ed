"""What takes longer than a second is announced, with how far it is; what does not is silent."""

from __future__ import annotations

import io
import sys
import time
from typing import Any

import pytest
import torch
from torch import nn

from autopar import progress as module
from autopar.progress import Progress, progress
from autopar.trace.export import trace
from autopar.trace.watch import layers_watched
from examples.gpt import GPT, GPTConfig


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.02)
    monkeypatch.setattr(module, "_NEXT_LINE_S", 0.05)


def work(doing: Progress, parts: int = 4) -> None:
    for part in doing.over(range(parts)):
        time.sleep(0.1)
        assert doing.done == part


@pytest.mark.usefixtures("impatient")
def test_slow_work_is_announced_in_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("tracing a model"):
        time.sleep(0.3)
    assert capsys.readouterr().err == "autopar: tracing a model …\n"
    with progress("searching the plans", 4) as doing:
        work(doing)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "autopar: searching the plans (0 of 4) …" and 2 <= len(lines) <= 5
    assert lines[-1] == "autopar: searching the plans (3 of 4) …"


@pytest.mark.usefixtures("impatient")
def test_on_a_terminal_one_line_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(module, "_REDRAW_S", 0.02)
    with progress("solving the placements", 4) as doing:
        doing.part = "tp=4"
        work(doing)
    with progress("pricing"):
        time.sleep(0.1)
    shown = terminal.getvalue()
    assert "\rautopar: solving the placements (tp=4)" in shown and "75%" in shown
    assert "\rautopar: pricing … 00:00" in shown
    assert "\n" not in shown and shown.endswith("\r") and not shown.split("\r")[-2].strip()  # nothing is left of it


@pytest.mark.usefixtures("impatient")
def test_work_of_another_process_is_counted_by_what_it_left(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("training", 5, lambda: 2):
        time.sleep(0.1)
    assert capsys.readouterr().err == "autopar: training (2 of 5) …\n"


def test_quick_work_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("nothing much"):
        pass
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_the_layers_of_a_trace_are_counted() -> None:
    """In any copy of the model, and with no hook left behind."""
    told: list[tuple[int, int]] = []
    ids = torch.zeros(2, 8, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    model = GPT(GPTConfig(n_layer=3, n_head=2, d_model=8, block_size=16, vocab_size=16))
    with layers_watched(GPT, lambda number, layers: told.append((number, layers))):
        trace(model, inputs, torch.float32)
    assert told[:3] == [(1, 3), (2, 3), (3, 3)]
    told.clear()
    nn.Sequential(nn.Linear(2, 2))(torch.zeros(1, 2))
    assert told == []
    doing = Progress("tracing GPT")
    doing.at_layer(2, 3)
    assert str(doing) == "tracing GPT (layer 2 of 3)" and doing.done == 1
