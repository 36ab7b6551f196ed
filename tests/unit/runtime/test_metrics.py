"""The line of a step: in a pipe one after the other, on a terminal one that is drawn over."""

from __future__ import annotations

import io
import sys

import pytest

from autopar.runtime.metrics import show


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(3, 5):
        show(f"step {step} · loss 1.0", step, range(3, 5))
    assert capsys.readouterr().out == "step 3 · loss 1.0\nstep 4 · loss 1.0\n"


def test_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with the last step, and is cut to what fits."""
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    for step in range(3, 5):
        show(f"step {step} · loss 1.0 · and much more", step, range(3, 5))
    first, second = terminal.getvalue().split("\r\x1b[2K")[1:]
    assert first == "██████████░░░░░░░░░░ 1 of 2 · step 3 · l"[:39]
    assert second == "████████████████████ 2 of 2 · step 4 · l"[:39] + "\n"
