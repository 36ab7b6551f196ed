"""The environment that `make` installs has timm, and no torchvision."""

from __future__ import annotations

import subprocess
import sys


def test_timm_imports_and_torchvision_stays_away() -> None:
    code = "import timm, importlib.util; print(timm.create_model('vit_tiny_patch16_224').num_classes)"
    code += "; print(importlib.util.find_spec('torchvision'))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout.split() == ["1000", "None"], ran.stderr
