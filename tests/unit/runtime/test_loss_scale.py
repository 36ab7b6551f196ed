"""The dynamic loss scale of fp16 against torch's own."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn

from autopar.runtime.precision import LossScale


@pytest.mark.parametrize("seed", range(5))
def test_it_does_what_torchs_grad_scaler_does(seed: int) -> None:
    """Over a random history of overflows: scale, growth counter, and which steps the optimizer takes."""
    draw = random.Random(seed)
    p = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.Adam([p])
    theirs = torch.amp.GradScaler("cpu", growth_interval=4)
    ours = LossScale(interval=4)
    taken = 0
    for _ in range(60):
        assert ours.scale == theirs.get_scale()
        gradient = draw.choice([1.0, 1.0, 1.0, 1.0, 1.0, math.inf, math.nan])
        optimizer.zero_grad()
        theirs.scale(p * gradient).backward()
        theirs.step(optimizer)
        theirs.update()
        overflow = ours.overflows(gradient)
        taken += not overflow
        ours.update(overflow)
        state = theirs.state_dict()
        assert (ours.scale, ours.clean) == (state["scale"], state["_growth_tracker"])
        assert float(optimizer.state[p]["step"] if p in optimizer.state else 0) == taken


def test_the_loss_is_scaled_in_fp32() -> None:
    """A loss of 2 in fp16 times 65,536 would be inf."""
    assert LossScale().scaled(torch.tensor(2.0, dtype=torch.float16)).item() == 131072
    loss = torch.tensor(2.0, dtype=torch.float64)
    assert LossScale(enabled=False).scaled(loss) is loss


def test_it_gives_up_below_one_or_after_many_skips() -> None:
    small, large = LossScale(4.0), LossScale(2.0**60, patience=5)
    for scale, skips in ((small, 3), (large, 5)):
        for i in range(skips):
            assert not scale.hopeless, i
            scale.update(True)
        assert scale.hopeless
    assert large.scale == 2.0**55


def test_a_clean_step_renews_the_patience() -> None:
    scale = LossScale(patience=2)
    for overflow in (True, False, True):
        scale.update(overflow)
    assert not scale.hopeless and scale.skipped == 1


def test_disabled_it_skips_nothing() -> None:
    scale = LossScale(enabled=False)
    assert not scale.overflows(math.inf)
    for _ in range(3000):
        scale.update(False)
    assert scale.scale == 1 and not scale.hopeless


def test_the_state_makes_the_round_trip() -> None:
    scale, other = LossScale(interval=5), LossScale()
    for overflow in (False, True, False, False):
        scale.update(overflow)
    other.load(scale.state())
    assert (other.scale, other.clean, other.skipped) == (32768.0, 2, 0)


def test_a_shorter_interval_than_a_resumed_run_had_is_met() -> None:
    scale, other = LossScale(interval=5), LossScale(interval=2)
    for _ in range(3):
        scale.update(False)
    other.load(scale.state())
    other.update(False)
    assert (other.scale, other.clean) == (131072.0, 0)


def test_growth_stays_finite() -> None:
    scale = LossScale(2.0**127, interval=1)
    scale.update(False)
    assert scale.scale == 2.0**127


@pytest.mark.parametrize("wrong", [{"initial": 0.5}, {"initial": math.inf}, {"interval": 0}, {"patience": 0}])
def test_wrong_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="loss scale"):
        LossScale(**wrong)  # type: ignore[arg-type]
