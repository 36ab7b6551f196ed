"""What ranks of cp exchange, keep and compute, counted as it happens and held against the cost model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from autopar.compile.compiler import cut_sequence
from autopar.cost_models.describe import describe
from autopar.ir.graph import B, S
from autopar.plan.plan import Plan
from autopar.runtime.data_parallel import local_part
from autopar.runtime.trainer import Trainer
from autopar.search.layouts import ALL_GATHER, MEGATRON_SP, RING, ULYSSES, Layout, replicated
from tests.distributed.programs import SEQUENCE, Subject, batches, local_batch, trainer_of
from tests.distributed.recorder import DataCollectives
from tests.distributed.test_context import encoder, llama
from tests.distributed.test_windows import mistral
from tests.harness import run_ranks

SAMPLES = 4


@dataclass
class Counts:
    """Calls of each collective on one group, bytes sent to one other rank, bytes of what backward keeps."""

    calls: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0
    kept_bytes: int = 0


@contextmanager
def kept(trainer: Trainer, counts: Counts) -> Iterator[None]:
    """Within: bytes of the storages that backward keeps, without parameters, ids and labels."""
    held = (*trainer.model.parameters(), *trainer.model.buffers())
    known = {local_part(p).untyped_storage().data_ptr() for p in held}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if x.is_floating_point() and storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            counts.kept_bytes += storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield


def counted(made: Subject, plan: Plan, axis: str = "cp") -> list[tuple[Counts, Counts]]:
    """Of each rank: forward and backward of one micro-batch."""
    source, weights, (batch, *_) = made.source(plan), made.weights, batches(samples=SAMPLES)

    def rank_main(rank: int) -> tuple[Counts, Counts]:
        trainer = trainer_of(source, weights)
        given = local_batch(trainer, batch)
        trainer._count(given)
        first, second = (DataCollectives(trainer.mesh.group(axis)) for _ in range(2))
        forward = Counts()
        with first, kept(trainer, forward):
            loss = trainer.model(**given)
        with second:
            loss.backward()
        forward = replace(forward, calls=first.counts, sent_bytes=first.sent_bytes)
        return forward, Counts(second.counts, second.sent_bytes)

    return run_ranks(plan.mesh.world_size, rank_main)


def planned(made: Subject, layout: Layout, cp: int = 1) -> Plan:
    return made.plan(cp=cp, context=layout, micro_batch=SAMPLES, global_batch=SAMPLES)


def priced(made: Subject, plan: Plan) -> dict[tuple[str, str], float]:
    """(phase, what) → calls and bytes sent in a layer, by the cost model."""
    costs = describe(cut_sequence(made.program, plan), replicated(cut_sequence(made.program, plan)), {B: 1, S: 8})
    (layer,) = costs.classes.values()
    values = {B: plan.batch.micro_batch, S: plan.batch.sequence // plan.mesh.cp}
    found: Counter[tuple[str, str]] = Counter()
    for transfer in layer.transfers:
        found[transfer.phase, transfer.collective] += transfer.times
        if transfer.collective == "send":
            found[transfer.phase, "bytes"] += transfer.times * int(transfer.size_bytes.subs(values))
    return dict(found)


@pytest.mark.parametrize("cp", [2, 4])
def test_s16_a_ring_sends_the_heads_of_keys_and_values(cp: int) -> None:
    """8 query and 2 K/V heads: bytes of 2, as the cost model says, forward and backward."""
    made = llama()
    plan = planned(made, RING, cp=cp)
    layers, own = (
        len(made.program.layer_calls),
        2 * SAMPLES * 2 * (SEQUENCE // cp) * 4 * 8,
    )  # K, V: heads, tokens, width
    model = priced(made, plan)
    for forward, backward in counted(made, plan):
        assert forward.sent_bytes == layers * (cp - 1) * own == layers * model["forward", "bytes"]
        assert backward.sent_bytes == layers * model["backward", "bytes"]
        assert set(forward.calls) == {"send", "recv_"}


def test_a_short_window_ends_the_ring() -> None:
    """4 tokens on each of 4 ranks, a window of 5: what a rank has is passed on once. The first gets none, the last
    sends none on, and a gradient comes back for each."""
    made = mistral(5)
    plan = planned(made, RING, cp=4)
    layers, own = len(made.program.layer_calls), 2 * SAMPLES * 2 * (SEQUENCE // 4) * 8 * 8
    model = priced(made, plan)
    assert (model["forward", "send"], model["backward", "send"]) == (1, 1)
    found = [(forward.sent_bytes, backward.sent_bytes) for forward, backward in counted(made, plan)]
    busiest = layers * own, layers * 2 * own
    assert busiest == (layers * model["forward", "bytes"], layers * model["backward", "bytes"])
    assert found == [(layers * own, layers * own), busiest, busiest, (0, layers * own)]


def test_ulysses_exchanges_four_times_a_layer() -> None:
    made = encoder()
    plan = planned(made, ULYSSES, cp=2)
    model = priced(made, plan)
    assert model["forward", "all_to_all"] == model["backward", "all_to_all"] == 4
    for forward, backward in counted(made, plan):
        assert forward.calls["all_to_all"] == backward.calls["all_to_all"] == 4 * len(made.program.layer_calls)
        assert set(forward.calls) == {"all_to_all"}


def test_gathered_keys_are_two_gathers_a_layer() -> None:
    made = encoder()
    plan = planned(made, ALL_GATHER, cp=2)
    model = priced(made, plan)
    assert model["forward", "all_gather"] == model["backward", "reduce_scatter"] == 2
    for forward, backward in counted(made, plan):
        layers = len(made.program.layer_calls)
        assert (forward.calls["gather"], backward.calls["scatter"]) == (2 * layers, 2 * layers)


def test_megatron_sequence_parallelism_gathers_and_scatters_twice_a_layer() -> None:
    made = llama()
    plan = made.plan(tp=2, layout=MEGATRON_SP, micro_batch=SAMPLES, global_batch=SAMPLES)
    of_layers = 2 * len(made.program.layer_calls)
    for forward, _ in counted(made, plan, "tp"):
        calls = forward.calls
        outside = calls["gather"] - of_layers, calls["scatter"] - of_layers
        assert outside in ((0, 1), (1, 1)), calls  # embedding and head have theirs


@pytest.mark.parametrize(("layout", "cp"), [(RING, 2), (RING, 4), (ULYSSES, 2)], ids=lambda v: getattr(v, "name", v))
def test_a_rank_keeps_its_part_of_the_activations(layout: Layout, cp: int) -> None:
    made = encoder()
    (whole, _), *_ = counted(made, planned(made, layout))
    for forward, _ in counted(made, planned(made, layout, cp=cp)):
        assert forward.kept_bytes == pytest.approx(whole.kept_bytes / cp, rel=0.1)
