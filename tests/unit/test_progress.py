"""What takes longer than a second is announced; what does not is silent."""

from __future__ import annotations

import time

import pytest

from autopar import progress as module
from autopar.progress import progress


def test_slow_work_is_announced_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    with progress("tracing a model"):
        time.sleep(0.3)
    assert capsys.readouterr().err == "autopar: tracing a model …\n"


def test_quick_work_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("nothing much"):
        pass
    time.sleep(0.05)
    assert capsys.readouterr().err == ""
