"""The states of the optimizer, taken from a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.runtime.optimizer import Optimizer


@pytest.mark.parametrize(("options", "device"), [({"capturable": True}, "meta"), ({}, "cpu")], ids=["there", "host"])
def test_a_counter_is_where_the_kernel_of_the_optimizer_wants_it(options: dict[str, Any], device: str) -> None:
    """On the device of the parameters, here "meta", for one that runs there whole; torch refuses it elsewhere."""
    optimizer = Optimizer({"w": nn.Parameter(torch.empty(2, device="meta"))}, "AdamW", options)
    optimizer.load_states("w", {"step": torch.tensor(3.0), "exp_avg": torch.empty(2, device="meta")})
    assert optimizer.states("w")["step"].device.type == device
