"""Ids outside the vocabulary and labels outside the classes: every rank raises, as the original model does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.runtime.bounds import notice_ids, notice_targets, take_noticed
from autopar.runtime.linear_loss import linear_cross_entropy
from autopar.runtime.trainer import Trainer
from tests.distributed.handwritten import (
    VOCABULARY,
    local_batch,
    make_batches,
    make_settings,
    original,
    program,
    weights_of,
)
from tests.harness import reference_run, run_ranks

OUTSIDE = [("input_ids", VOCABULARY), ("input_ids", -1), ("labels", VOCABULARY), ("labels", -1)]


def with_one(batch: dict[str, Tensor], name: str, value: int) -> dict[str, Tensor]:
    """The batch with one id of its last sample, which the second replica has, changed."""
    changed = batch[name].clone()
    changed[-1, 0] = value
    return {**batch, name: changed}


@pytest.mark.parametrize(("name", "value"), OUTSIDE)
def test_the_original_raises(name: str, value: int) -> None:
    with pytest.raises(IndexError):
        original()(**with_one(make_batches(1)[0], name, value))


def test_every_rank_raises_before_a_weight_changes_and_the_next_batch_trains() -> None:
    """dp2 · tp2: the replica without the sample raises too."""
    (batch,), model = make_batches(1), original()
    expected = reference_run(model, [batch], torch.optim.AdamW).losses[0]
    settings = make_settings(dp=2, tp=2)

    def rank_main(rank: int) -> None:
        trainer = Trainer(program(settings), weights_of(model), device="cpu")
        for name, value in OUTSIDE:
            bad = local_batch(with_one(batch, name, value), settings, trainer.mesh.rank("dp"))
            with pytest.raises(IndexError, match=r"step 0: an id is outside .* input_ids -?\d+ to \d+, labels"):
                trainer.step(bad)
        result = trainer.step(local_batch(batch, settings, trainer.mesh.rank("dp")))
        assert result.loss == pytest.approx(expected, rel=1e-9)

    run_ranks(4, rank_main)


@pytest.mark.parametrize(("target", "outside"), [(5, 1), (-1, 1), (4, 0), (-100, 0), (0, 0)])
def test_a_loss_in_slices_notices_targets_on_one_rank(target: int, outside: int) -> None:
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    loss = linear_cross_entropy(x, weight, torch.tensor([1, target, 2]), 2)
    assert take_noticed(loss) == outside
    assert take_noticed(loss) == 0, "it is told once"


def test_noticing_does_not_wait_for_the_device() -> None:
    """Tensors on meta have no value that could be read."""
    ids = torch.ones(3, dtype=torch.long, device="meta")
    notice_ids(ids, 2)
    notice_targets(ids, 2, -100)
    assert take_noticed(torch.zeros((), device="meta")).is_meta
