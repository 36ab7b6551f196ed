"""The examples run as a user runs them: each plans, trains with torchrun, and proves its program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("example", ["gpt", "llama"])
def test_an_example_keeps_its_promises(example: str, tmp_path: Path) -> None:
    script = ROOT / "examples" / f"{example}.py"
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    out = done.stdout
    assert "over the budget" in out and "under the budget" in out
    assert "step 99 ·" in out
    assert "computes what the model computes" in out


@pytest.mark.slow
@pytest.mark.parametrize("example", ["siamese", "vit", "t5"])
def test_an_example_of_another_kind(example: str, tmp_path: Path) -> None:
    """Vision, encoder-decoder, one's own module: trained on its own data, with less loss, as the model would be."""
    script = ROOT / "examples" / f"{example}.py"
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert "step 19 ·" in done.stdout
    assert "computes what the model computes" in done.stdout
