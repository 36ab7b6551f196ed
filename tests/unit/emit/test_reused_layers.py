"""A model that uses its layers twice reads as one written by hand: declared once, counts named for what they are."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from autopar.api import parallelize
from examples.siamese import LENGTH, build, loss


@cache
def source(**pins: Any) -> str:
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    inputs = {"left": ids, "right": ids.clone(), "alike": torch.zeros(2)}
    gpus = pins.get("tp", 1) * pins.get("pp", 1)
    result = parallelize(build(), gpus, gpu="h100-sxm-80gb", inputs=inputs, loss=loss, global_batch=8, **pins)
    return result.source()


def test_on_one_stage_layers_are_declared_once() -> None:
    text = source(tp=2)
    assert text.count("submodule(self,") == 1
    assert text.count('"embedding.weight"') == text.count('"head.weight"') == 1
    assert " tie" not in text
    assert "What comes between one use of layers and the next." in text


def test_each_stage_declares_what_it_uses() -> None:
    """The second use may be on a stage that does not have the first."""
    assert source(pp=2).count("submodule(self,") == 2


def test_counts_are_named() -> None:
    text = source(tp=2)
    assert "    return count, count_2" in text
    assert "left_2" not in text
