"""A plan that someone has written or edited, instead of the search's: checked as any other, and priced as it stands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .api import Parallelized
from .compile.compiler import compile_program, cut_sequence
from .compile.solutions import Key, Placements, models_of
from .cost_models.compute import price_model
from .cost_models.memory import host_room_bytes
from .cost_models.step_time import estimate_price
from .errors import InfeasibleError, PlanError
from .ir.graph import Program
from .plan.options import CONTEXT_LAYOUTS, nearest
from .plan.plan import Plan, Solution
from .search.layouts import LAYOUTS, replicated
from .search.search import Candidate
from .search.sizes import gib


def with_given(result: Parallelized, plan: Plan) -> Parallelized:
    """`result`, of the same model and mesh, with `plan` for the chosen one; its placements where `plan` has none.

    Raises PlanError where the plan is none of this model, InfeasibleError where it does not fit.
    """
    if plan.mesh.tp == 1 or not plan.solution.strategies:
        plan = plan.changed(solution=result.plan.solution)
    if plan.mesh.cp == 1 or not plan.context.strategies:
        plan = plan.changed(context=result.plan.context)
    _check_names(result.program, plan)
    compile_program(result.program, plan)
    plan = plan.changed(context=_whole(plan.context, result.program))
    return _priced(result, plan.changed(solution=_whole(plan.solution, cut_sequence(result.program, plan))))


def _whole(solution: Solution, program: Program) -> Solution:
    """The solution with the blocks that a file leaves out."""
    return replace(solution, strategies={**replicated(program).strategies, **solution.strategies})


def _check_names(program: Program, plan: Plan) -> None:
    """PlanError where the plan names a block, a node, a parameter or a layout that the program has not."""

    def known(what: str, names: Iterable[str], has: Iterable[str]) -> None:
        for name in sorted(set(names) - set(has)):
            raise PlanError(f"{what} {name!r} is not in {program.name}{nearest(name, has)}: plan again, or take it out")

    known("layout", {plan.solution.name} - {""}, [layout.name for layout in LAYOUTS])
    known("context", {plan.context.name} - {""}, CONTEXT_LAYOUTS)
    program = cut_sequence(program, plan)
    known("placements: block", plan.solution.strategies, list(program.blocks))
    for block, nodes in plan.solution.strategies.items():
        known(f"placements: {block}: node", nodes, [node.name for node in program.blocks[block].graph.nodes])
    for names, _ in plan.optimizer.groups:
        known("optimizer: groups: parameter", names, list(program.parameters))


def _priced(result: Parallelized, plan: Plan) -> Parallelized:
    """The same with `plan`, its stages and placements, for the chosen one. InfeasibleError if it does not fit."""
    hardware, request = result.job.cluster.hardware, result.result.request
    local = cut_sequence(result.program, plan)
    solutions = {Key.of(plan): Placements(plan.context, plan.solution, local)}
    (costs,) = models_of(result.job, result.program, solutions, request.pins)
    (price,) = price_model(costs, [plan.batch.micro_batch], plan.batch.sequence, hardware, plan.compute.precision)
    estimate = estimate_price(price, plan, hardware)
    if estimate.peak_bytes > request.budget_bytes:
        short = gib(estimate.peak_bytes - request.budget_bytes)
        raise InfeasibleError(
            f"the plan needs {gib(estimate.peak_bytes)} a {hardware.unit}, {short} more than the budget of "
            f"{gib(request.budget_bytes)}: give --memory, or edit zero, recompute, micro_batch or stages"
        )
    kept, room = max(stage.host_bytes for stage in estimate.stages), host_room_bytes(hardware)
    if kept > room:
        raise InfeasibleError(
            f"the plan keeps {gib(kept)} a GPU on the host, and a GPU's share of its node is {gib(room)}: "
            "edit offload, hsdp or the mesh"
        )
    found = replace(result.result, best=(Candidate(plan, costs, estimate),))
    return replace(result, solutions=solutions, result=found)
