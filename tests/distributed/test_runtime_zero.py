"""The runtime keeps its word: every ZeRO stage × pipeline × accumulation × tp × kind of parameter, in fp64.

Each case equals one process in loss, gradients, norm and weights, and communicates and keeps over the data
axis what the table of `autopar/runtime/data_parallel.py` says (Z8: and the ledger of the cost model agrees).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from autopar.cost_models.hardware import gpu
from autopar.cost_models.memory import ledger
from autopar.cost_models.stage_memory import StageMemory
from autopar.cost_models.states import States
from autopar.runtime.data_parallel import local_part
from autopar.runtime.settings import Settings
from autopar.runtime.trainer import Trainer
from tests.distributed.handwritten import (
    local_batch,
    make_batches,
    make_settings,
    original,
    program,
    weights_of,
)
from tests.distributed.recorder import DataCollectives
from tests.harness import Reference, assert_parity, reference_run, run_ranks
from tests.zero_table import collective_counts, resident_bytes

TOLERANCE = 1e-9
KINDS = {"plain": (False, False), "tied": (True, False), "fused": (False, True)}


@dataclass(frozen=True)
class Resident:
    """Bytes of whole (over the data axis) parameters and gradients that fully_shard holds."""

    parameters: int
    gradients: int


def resident(model: torch.nn.Module) -> Resident:
    parameters = gradients = 0
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for p in group.fsdp_params:
                parameters += sum(t.untyped_storage().nbytes() for t in p.all_gather_outputs)
                unsharded = getattr(p, "_unsharded_param", None)
                for grad in (p.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad):
                    gradients += 0 if grad is None else local_part(grad).numel() * grad.element_size()
    return Resident(parameters, gradients)


def watch_between_micro_batches(trainer: Trainer) -> list[Resident]:
    """What is held before the backward of each micro-batch of a step but the first."""
    seen: list[Resident] = []
    (replicas,) = trainer.data_parallel
    before_backward: Callable[[bool], None] = replicas.before_backward

    def watched(last: bool) -> None:
        seen.append(resident(trainer.model))
        before_backward(last)

    replicas.before_backward = watched  # type: ignore[method-assign]
    return seen


def expected_counts(settings: Settings, units: int) -> dict[str, int]:
    m = settings.accumulation
    return {
        0: {"all_reduce": 1},
        1: {"gather": units, "scatter": units},
        2: {"gather": units, "scatter": m * units},
        3: {"gather": 2 * m * units, "scatter": m * units},
    }[settings.zero]


def expected_resident(settings: Settings, whole_bytes: int) -> Resident:
    kept = {0: (0, 0), 1: (whole_bytes, whole_bytes), 2: (whole_bytes, 0), 3: (0, 0)}[settings.zero]
    return Resident(*kept)


def check_case(settings: Settings, kind: str, weights: dict[str, Tensor], reference: Reference) -> None:
    trainer = Trainer(program(settings, *KINDS[kind], recompute=(1,)), weights, device="cpu")
    replica = trainer.mesh.rank("dp")
    first, second = (local_batch(batch, settings, replica) for batch in make_batches(2))

    results = [trainer.step(first)]
    gradients = trainer.gradients()
    seen = watch_between_micro_batches(trainer)
    with DataCollectives(trainer.mesh.group("data")) as counter:
        results.append(trainer.step(second))

    assert_parity(gradients, {n: reference.gradients[0][n] for n in gradients}, TOLERANCE, "gradients")
    final = trainer.state_dict()
    assert_parity(final, {n: reference.weights[n] for n in final}, TOLERANCE, "weights")
    for result, loss, norm in zip(results, reference.losses, reference.norms, strict=True):
        assert result.loss == pytest.approx(loss, rel=TOLERANCE)
        assert result.grad_norm == pytest.approx(norm, rel=TOLERANCE)

    # Not of the gradients: the number of targets, and loss and norm where all ranks are replicas.
    count = counter.counts - Counter({"all_reduce": 1 + (settings.world_size == settings.dp)})
    units = sum(isinstance(m, FSDPModule) for m in trainer.model.modules())
    assert dict(count) == expected_counts(settings, units)
    whole = sum(p.numel() // (settings.tp if _tp_sharded(p) else 1) for p in trainer.parameters.values()) * 8
    assert seen[1:] == [expected_resident(settings, whole)] * (settings.accumulation - 1)
    check_ledger(settings, units, whole)


def check_ledger(settings: Settings, units: int, whole_bytes: int) -> None:
    """The cost model prices the collectives and holds the bytes that were just seen."""
    counted = collective_counts(settings.zero, settings.accumulation, units if settings.zero else 1)
    named = {"gather": counted.all_gather, "scatter": counted.reduce_scatter, "all_reduce": counted.all_reduce}
    assert {name: n for name, n in named.items() if n} == expected_counts(settings, units)
    if settings.zero == 0 or settings.accumulation == 1:
        return  # outside fully_shard nothing is a copy; with one micro-batch there is no between
    states = States(settings.zero, settings.accumulation, settings.dp, settings.precision)
    held = resident_bytes(states, whole_bytes // 8)
    assert Resident(int(held.parameter_bytes), int(held.gradient_bytes)) == expected_resident(settings, whole_bytes)


def _tp_sharded(p: Tensor) -> bool:
    if not isinstance(p, DTensor) or p.device_mesh.mesh_dim_names is None:
        return False
    return dict(zip(p.device_mesh.mesh_dim_names, p.placements, strict=True)).get("tp", Replicate()).is_shard()


EVERY = tuple(itertools.product((0, 1, 2, 3), (1, 4), KINDS))
# Each stage with each number of micro-batches, and the kinds in turn.
COVER = tuple(case for case in EVERY if (case[0] + case[1]) % 3 == list(KINDS).index(case[2]))


@pytest.mark.parametrize(
    "cases", [pytest.param(COVER, id="cover"), pytest.param(EVERY, id="all", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (1, 2), (2, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_every_zero_stage_equals_one_process(pp: int, tp: int, cases: tuple[tuple[int, int, str], ...]) -> None:
    batches = make_batches(2)
    models = {kind: original(*options) for kind, options in KINDS.items()}
    references = {kind: reference_run(model, batches, torch.optim.AdamW) for kind, model in models.items()}
    weights = {kind: weights_of(model) for kind, model in models.items()}

    def rank_main(rank: int) -> None:
        for zero, m, kind in cases:
            settings = make_settings(pp=pp, dp=2, tp=tp, zero=zero, micro_batches=m)
            try:
                check_case(settings, kind, weights[kind], references[kind])
            except Exception as error:
                raise AssertionError(f"zero={zero} micro_batches={m} {kind}") from error

    run_ranks(pp * 2 * tp, rank_main, timeout=150)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_one_data_rank_in_whole_precision_holds_one_copy(zero: int) -> None:
    """Masters, states and gradients, and no more: as the ledger has it."""
    settings = make_settings(pp=1, dp=1, tp=1, zero=zero, micro_batches=2)
    weights, batch = weights_of(original(False, False)), make_batches(1)[0]

    def rank_main(rank: int) -> tuple[int, int]:
        trainer = Trainer(program(settings, False, False), weights, device="cpu")
        trainer.step(batch)
        assert not any(isinstance(module, FSDPModule) for module in trainer.model.modules())
        held = [t for p in trainer.parameters.values() for t in (p, p.grad)]
        held += [state for name in trainer.parameters for state in trainer.optimizer.states(name).values()]
        large = [t for t in held if t is not None and t.dim()]
        return sum(t.numel() * t.element_size() for t in large), sum(p.numel() for p in trainer.parameters.values())

    ((held_bytes, elements),) = run_ranks(1, rank_main)
    states = States(zero, 2, 1, settings.precision)
    stage = StageMemory(elements, elements, (elements,), 0.0, 0.0, 1)
    priced = {term.name: term.size_bytes for term in ledger(stage, states, gpu("h100-sxm-80gb"), 1)}
    assert held_bytes == sum(list(priced.values())[:4])
    assert priced["gathered units"] == priced["reduction buffers"] == 0
