"""Random objectives give random legal plans: the best fuzz of rules, solver, passes and emitter there is.

Each plan minimises costs drawn for every strategy, stored placement and conversion. All gradients are exact.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import fx

from autopar.compile.compiler import compile_program
from autopar.emit.emission import Predicted
from autopar.emit.source import model_source
from autopar.ir.graph import NodeInfo
from autopar.ir.ops import is_collective
from autopar.placement import CONVERSIONS, Placement, Strategy
from autopar.plan.plan import Plan
from autopar.search.layouts import FREE
from tests.distributed.programs import Subject, batches, compare, gpt, llama, local_batch, parallel, trainer_of
from tests.harness import Reference, run_ranks

LAYERS, SAMPLES = 2, 4
# (pp, dp, tp) and how many of each 25 plans run on it.
MESHES = {(1, 1, 2): 16, (1, 2, 2): 3, (2, 1, 2): 3, (1, 1, 4): 3}
GROUP = sum(MESHES.values())


DATA = batches(steps=1, samples=SAMPLES)


@dataclass(frozen=True)
class RandomCosts:
    """Costs that depend on `seed` and on what they are the cost of; with odd seeds conversions are cheap."""

    seed: int

    def strategy(self, node: fx.Node, strategy: Strategy) -> float:
        return self._draw(node.name, strategy)

    def stored(self, facts: NodeInfo, placement: Placement) -> float:
        return self._draw(facts.ref, placement)

    def conversion(self, facts: NodeInfo, source: Placement, target: Placement) -> float:
        return (0.05 if self.seed % 2 else 1.0) * self._draw(facts.module, facts.shape, source, target)

    def _draw(self, *what: object) -> float:
        """Four decades below a microsecond, the scale that the solver works in."""
        digest = hashlib.blake2b(repr((self.seed, *map(str, what))).encode(), digest_size=8).digest()
        (number,) = struct.unpack("Q", digest)
        return float(10 ** (4 * number / 2**64 - 10))


@dataclass(frozen=True)
class Case:
    seed: int
    subject: Subject
    plan: Plan
    source: str
    conversions: frozenset[str]


def random_case(seed: int, mesh: tuple[int, int, int]) -> Case:
    subject = [gpt, llama, parallel][seed % 3](torch.float64, LAYERS)
    choose = random.Random(seed)
    pp, dp, tp = mesh
    plan = subject.plan(
        pp,
        dp,
        tp,
        layout=FREE,
        costs=RandomCosts(seed),
        micro_batch=2 // dp if pp == 1 else 1,
        recompute=[i for i in range(LAYERS) if choose.random() < 0.3],
        schedule=choose.choice(["gpipe", "1f1b"]),
        global_batch=SAMPLES,
        zero=choose.choice([0, 1, 2, 3]),
    )
    _reference(subject)  # before any fork
    program = compile_program(subject.program, plan)
    used = {node.target.__name__ for _, node in program.each_op() if is_collective(node.target)}  # type: ignore[union-attr]
    return Case(seed, subject, plan, model_source(program, plan, Predicted()), frozenset(used))


@cache
def _reference(subject: Subject) -> Reference:
    return subject.reference_on(DATA)


def gradient_errors(rank: int, cases: Sequence[Case]) -> dict[int, tuple[float, str]]:
    """On a rank: the worst first gradient of each program, and the norm's error where that is worse."""
    (batch,) = DATA
    found = {}
    for case in cases:
        trainer = trainer_of(case.source, case.subject.weights)
        result = trainer.step(local_batch(trainer, batch))
        reference = _reference(case.subject)
        norm = abs(result.grad_norm / reference.norms[0] - 1)
        found[case.seed] = max(compare(trainer.gradients(), reference.gradients[0]), (norm, "total norm"))
    return found


@pytest.mark.slow  # as combinations of every technique, and random models, are without it
@pytest.mark.parametrize("group", range(4))
def test_random_plans(group: int) -> None:
    """25 plans a group, of which every conversion of the table occurs in at least one."""
    seeds = iter(range(group * GROUP, (group + 1) * GROUP))
    used: set[str] = set()
    wrong: dict[int, tuple[float, str]] = {}
    for mesh, count in MESHES.items():
        cases = [random_case(next(seeds), mesh) for _ in range(count)]
        for errors in run_ranks(cases[0].plan.mesh.world_size, gradient_errors, cases, timeout=200):
            wrong |= {seed: error for seed, error in errors.items() if not error[0] <= 1e-9}
        used |= {name for case in cases for name in case.conversions}
    assert not wrong
    assert used == {conversion.function for conversion in CONVERSIONS.values()}
