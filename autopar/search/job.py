"""From a job to the search: the tp sizes worth a look, their solutions, and the search under the job's limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..cost_models.describe import describe
from ..cost_models.layer_costs import ModelCosts
from ..errors import InfeasibleError, PlanError
from ..ir.graph import B, Program, S
from ..ir.units import read_elsewhere
from ..placement import Strategy
from ..plan import Solution
from ..request import Job
from ..rules import Axis
from ..rules.data_axis import data_types
from .intra_op import solve
from .layouts import Layout, position_rows, replicated, why_not
from .op_costs import TimeCosts
from .search import SearchResult, search
from .space import Pins, divisors

_LEAST_SHARDED = 0.5

Solutions = Mapping[tuple[int, str], Solution]  # by tp size and name of the layout


def solve_layouts(
    program: Program, job: Job, sizes: Sequence[int], layouts: Sequence[Layout]
) -> tuple[dict[tuple[int, str], Solution], dict[int, str]]:
    """The solutions of the intra-op search for each tp size, equal ones once; and why some sizes have none."""
    values = {B: 1, S: job.sequence}
    found: dict[tuple[int, str], Solution] = {}
    unsolved: dict[int, str] = {}
    for tp in sizes:
        if tp == 1:
            found[1, ""] = replicated(program)
            continue
        costs = TimeCosts(job.cluster.hardware, job.precision, tp, values)
        seen: list[Mapping[str, Mapping[str, Strategy]]] = []
        for layout in layouts:
            try:
                solution = solve(program, Axis("tp", tp, sequence=layout.sequence, values=values), costs, layout)
            except InfeasibleError as error:
                unsolved[tp] = str(error)
                continue
            if solution.strategies not in seen:
                seen.append(solution.strategies)
                found[tp, layout.name] = solution
    solved = {tp for tp, _ in found}
    return found, {tp: reason for tp, reason in unsolved.items() if tp not in solved}


def search_job(
    job: Job, program: Program, solutions: Solutions, pins: Pins, illegal: Mapping[int, str]
) -> SearchResult:
    """The search with the costs of each solution, and what the model itself forbids."""
    values = {B: 1, S: job.sequence}
    models: dict[int, list[ModelCosts]] = {}
    for (tp, _), solution in solutions.items():
        models.setdefault(tp, []).append(describe(program, solution, values, job.compile))
    for tp in set(models) - {1}:
        # A solution that divides little of the work is a smaller tp with idle ranks.
        divided = [costs for costs in models[tp] if costs.sharded_fraction >= _LEAST_SHARDED]
        if divided or tp != pins.tp:
            models[tp] = divided
    models = {tp: costs for tp, costs in models.items() if costs}
    if any(read_elsewhere(program)):
        forbidden = {"zero": [3], "pp": range(2, job.cluster.gpus + 1)}
        pins = replace(pins, forbid={k: {*pins.forbid.get(k, ()), *v} for k, v in {**pins.forbid, **forbidden}.items()})
    return search(
        models, job.cluster, global_batch=job.global_batch, sequence=job.sequence, budget_bytes=job.budget_bytes,
        precision=job.precision, optimizer=job.optimizer, pins=pins, illegal_tp=illegal,
        coupling=data_types(program).coupling, compiled=job.compile,
    )  # fmt: skip


def tp_sizes(job: Job, pins: Pins) -> list[int]:
    """tp sizes worth a look: divisors of the cluster inside one node, unless pinned."""
    if pins.tp is not None:
        return [pins.tp]
    return [t for t in divisors(job.cluster.gpus) if t <= job.cluster.hardware.gpus_per_node]


def illegal_sizes(program: Program, job: Job, pins: Pins) -> dict[int, str]:
    """Why some tp sizes cannot be; PlanError where the pinned one cannot, or the sequence is too long."""
    values = {B: 1, S: job.sequence}
    low, high = program.sequence_range
    if not low <= job.sequence <= high:
        raise PlanError(f"sequence={job.sequence}: the model's forward allows {low} to {high} (a branch on the length)")
    if (rows := position_rows(program)) is not None and rows < job.sequence:
        raise PlanError(f"sequence={job.sequence}: the model's table of positions has {rows} rows; use at most {rows}")
    reasons = {tp: why_not(program, tp, values) for tp in tp_sizes(job, pins) if tp > 1}
    if pins.tp is not None and reasons.get(pins.tp):
        nodes = range(1, job.cluster.hardware.gpus_per_node + 1)
        legal = ", ".join(str(tp) for tp in nodes if why_not(program, tp, values) is None)
        raise PlanError(f"tp={pins.tp}: {reasons[pins.tp]}: use one of tp={legal}, or leave tp free")
    return {tp: reason for tp, reason in reasons.items() if reason is not None}
