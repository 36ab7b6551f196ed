"""A sequence of 100,000 tokens on 8 processes, within memory that one process exceeds."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from autopar.runtime.memory import LiveStorage
from autopar.search.layouts import RING
from examples.gpt import GPT, GPTConfig
from tests import models
from tests.distributed.programs import Batch, Subject, batches, local_batch, subject, trainer_of
from tests.harness import run_ranks

RANKS = 8
WIDTH, LAYERS, VOCABULARY = 32, 2, 97


def long_gpt(tokens: int) -> Subject:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=VOCABULARY, n_layer=LAYERS, n_head=2, d_model=WIDTH, block_size=tokens)
    ids = torch.zeros(2, 64, dtype=torch.long)
    model = GPT(config)
    program = models.layered(model, {"input_ids": ids, "labels": ids}, torch.float32)
    return subject(model, torch.float32, program)


def kept_by_one_process(made: Subject, batch: Batch) -> int:
    """Bytes alive once the original has made its loss: the least that its step needs."""
    live = LiveStorage()
    with live:
        loss: Tensor = made.model(**batch)
        kept = live.live()
    assert loss.isfinite()
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [100_000])
def test_a_long_sequence_fits_where_it_is_cut(tokens: int) -> None:
    made = long_gpt(tokens)
    plan = made.plan(cp=RANKS, context=RING, micro_batch=1, global_batch=1, sequence=tokens)
    source, weights, (batch,) = made.source(plan), made.weights, batches(1, samples=1, sequence=tokens)
    batch["labels"][:] = batch["input_ids"]  # `batches` pads its first samples

    def rank_main(rank: int) -> tuple[float, int, float]:
        trainer, live, started = trainer_of(source, weights), LiveStorage(), time.monotonic()
        with live:
            result = trainer.step(local_batch(trainer, batch))
        return result.loss, live.peak, time.monotonic() - started

    found = run_ranks(RANKS, rank_main, timeout=1500)
    with torch.no_grad():
        expected = float(made.model(**batch))
    whole = kept_by_one_process(made, batch)
    peaks = [peak for _, peak, _ in found]
    print(
        f"{tokens:,} tokens: at most {max(peaks) / 2**20:.0f} MiB on each of {RANKS} processes, one process keeps "
        f"{whole / 2**20:.0f} MiB; {max(seconds for *_, seconds in found):.0f} s a step"
    )
    assert all(abs(loss - expected) <= 1e-5 * expected for loss, *_ in found)
    assert max(peaks) < whole / 2  # the budget: half of what one process would need
