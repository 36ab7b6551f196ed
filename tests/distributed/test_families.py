"""Every family trains as the original does, under each strategy that is legal for it; and why not where one is not.

fp64, five AdamW steps, every quantity to 1e-9 on every rank. `make test` covers family × strategy pairwise, the rest
is slow.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.rules.spread import data_types
from autopar.search.layouts import MEGATRON_SP
from tests.distributed.families import family
from tests.distributed.programs import GLOBAL_BATCH, assert_parity
from tests.zoo import FAMILIES

STRATEGIES: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2, "micro_batch": 3},
    "tp2": {"tp": 2},
    "tp2-sp": {"tp": 2, "layout": MEGATRON_SP},
    "pp2": {"pp": 2},
    "dp2-tp2-pp2": {"dp": 2, "tp": 2, "pp": 2, "micro_batch": 3},
    "zero3": {"dp": 2, "micro_batch": 3, "zero": 3},
    "recompute": {"recompute": "all"},
}
CASES = [(name, strategy) for name in FAMILIES for strategy in STRATEGIES]
SKIPS = ("t5", "whisper", "unet")  # values that are read several stages later
QUICK = {
    (name, strategy) for i, name in enumerate(FAMILIES) for j, strategy in enumerate(STRATEGIES) if (i + j) % 6 == 0
}


@pytest.mark.parametrize(
    ("name", "strategy"), [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES]
)
def test_family(name: str, strategy: str) -> None:
    """ResNet's batch norm is synchronised: then the batch of a step is one micro-batch."""
    subject, options = family(name, torch.float64), STRATEGIES[strategy]
    coupled = data_types(subject.program).coupling is not None
    assert coupled == (name == "resnet")
    if coupled:
        options = {**options, "micro_batch": GLOBAL_BATCH // options.get("dp", 1), "schedule": "gpipe"}
    assert_parity(subject, subject.plan(**options))


@pytest.mark.parametrize("name", SKIPS)
def test_p6_a_value_that_is_read_several_stages_later(name: str) -> None:
    subject = family(name, torch.float64)
    assert_parity(subject, subject.plan(pp=3))
