"""The search over plans, best first, pruned by lower bounds: exact but for virtual stages, split near the best.

For each choice (mesh, micro-batch, schedule, ZeRO) and each pair of solutions on cp and tp: stages by dynamic
programming, where a stage costs its time with the cheapest recompute that fits; then the simulated step. Choices are
taken in the order of a lower bound of their step, and left out once it says that they cannot win.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from autopar.cost_models.compute import ModelPrice, price_model
from autopar.cost_models.hardware import Cluster, Hardware
from autopar.cost_models.layer_costs import ModelCosts
from autopar.cost_models.step_time import Estimate, estimate_price, update_time_s
from autopar.errors import InfeasibleError
from autopar.plan.plan import Plan, Solution
from autopar.plan.recompute import RecomputeChoice
from autopar.progress import progress
from autopar.rules.spread import Coupling
from autopar.runtime.choices import Mesh, Pipeline

from .boundaries import Ranges
from .case import Case, bound_s, bubble_s
from .infeasible import infeasible_text
from .loss_chunks import LossPrices, chunkable, loss_prices
from .pins import Request
from .space import Choice, enumerate_space
from .stages import Known, StageCosts, context_of
from .virtual import split_virtual

# Of the plans that can win, by ascending bound: some minutes. Llama-3-8B on 64 GPUs has about a thousand.
_MOST_SOLVED = 10_000


@dataclass(frozen=True)
class Candidate:
    """A plan with its prediction. Its solution has a name only; `model` is the costs it stands for."""

    plan: Plan
    model: ModelCosts
    estimate: Estimate


@dataclass(frozen=True)
class SearchResult:
    """The best plan of each mesh, best first, and what the search went through.

    searched = choices × solutions; do_not_fit of them exceed the budget, pruned were left out by their bound, and
    not_priced because enough of a smaller bound were priced.
    """

    best: tuple[Candidate, ...]
    request: Request
    cluster: Cluster
    searched: int
    do_not_fit: int
    pruned: int
    not_priced: int
    not_legal: tuple[str, ...]
    notes: tuple[str, ...]
    elapsed_s: float

    @property
    def chosen(self) -> Candidate:
        return self.best[0]


def search(
    models: Sequence[ModelCosts],
    cluster: Cluster,
    request: Request,
    illegal: Mapping[str, str] | None = None,
    keep: int = 5,
) -> SearchResult:
    """The fastest plans under the budget, one a mesh, `keep` in all.

    models: costs of each solution, of compiled layers if the request compiles them; illegal: why other sizes have
    none, "tp=3" → why. PlanError for a request that is no plan, InfeasibleError if none fits.
    """
    started, hardware = time.perf_counter(), cluster.hardware
    models = chunkable(models, request.pins)
    layers = max(1, len(models[0].layers))
    space = enumerate_space(request, cluster, layers, {(model.cp, model.tp) for model in models}, illegal or {})
    cases = _cases(space.choices, models, request, hardware)
    ranking = _Ranking(keep, cluster.gpus)
    with progress("searching the plans", len(cases)) as so_far:
        do_not_fit, pruned, not_priced = _rank(so_far.over(cases), ranking, request, hardware)
        if not ranking.best:
            raise InfeasibleError(infeasible_text(cases, request, hardware))
    best = ranking.ranked()
    return SearchResult(
        best=best,
        request=request,
        cluster=cluster,
        searched=len(cases),
        do_not_fit=do_not_fit,
        pruned=pruned,
        not_priced=not_priced,
        not_legal=space.not_legal,
        notes=_notes(best, cluster, request.coupling),
        elapsed_s=time.perf_counter() - started,
    )


def _rank(cases: Iterable[Case], ranking: _Ranking, request: Request, hardware: Hardware) -> tuple[int, int, int]:
    """Solve the cases that can win, best bound first: how many do not fit, cannot win, and were not priced."""
    do_not_fit = pruned = solved = not_priced = 0
    prices: dict[int, LossPrices] = {}  # of each model price
    roomy: set[tuple[Choice, str, str]] = set()  # that fit with nothing recomputed: offload would only cost time
    for case in cases:
        limit_s = ranking.limit_s(case.choice)
        if case.bound_s >= limit_s:
            pruned += 1
            continue
        loaded = replace(case.choice, sharding=replace(case.choice.sharding, offload=False))
        kept = loaded, case.price.model.context, case.price.model.solution
        if case.choice.sharding.offload and kept in roomy:
            pruned += 1
            continue
        if solved >= _MOST_SOLVED and ranking.best:
            not_priced += 1
            continue
        solved += 1
        if id(case.price) not in prices:
            prices[id(case.price)] = loss_prices(case.price, request)
        candidate, may_fit = _solve(case, prices[id(case.price)], request, hardware, limit_s)
        do_not_fit += not may_fit
        if candidate is not None:
            ranking.add(candidate)
            if not candidate.plan.activations.recompute and candidate.plan.activations.loss_chunks == 1:
                roomy.add(kept)
    return do_not_fit, pruned, not_priced


def _cases(
    choices: Sequence[Choice],
    models: Sequence[ModelCosts],
    request: Request,
    hardware: Hardware,
) -> list[Case]:
    """Every choice with every solution, by ascending lower bound; among equals the earlier choice first."""
    sizes: dict[tuple[int, int], set[int]] = {}
    for choice in choices:
        sizes.setdefault((choice.mesh.cp, choice.mesh.tp), set()).add(choice.batch.micro_batch)
    prices: dict[tuple[int, int], list[dict[int, ModelPrice]]] = {at: [] for at in sizes}
    for model in models:
        if (at := (model.cp, model.tp)) in sizes:
            found = price_model(model, sorted(sizes[at]), request.batch.sequence, hardware, request.compute.precision)
            prices[at].append({price.micro_batch: price for price in found})
    cases = [
        Case(
            _bound_s(choice, solution[choice.batch.micro_batch], request, hardware),
            choice,
            solution[choice.batch.micro_batch],
        )
        for choice in choices
        for solution in prices[choice.mesh.cp, choice.mesh.tp]
    ]
    return sorted(cases, key=lambda case: case.bound_s)


def _bound_s(choice: Choice, price: ModelPrice, request: Request, hardware: Hardware) -> float:
    """No step is shorter: the pipeline's bound, then the optimizer's time on the average stage."""
    update_s = update_time_s(price.parameters / choice.mesh.pp, context_of(choice, request, hardware))
    return bound_s(choice, price) + update_s


def _solve(
    case: Case, prices: LossPrices, request: Request, hardware: Hardware, limit_s: float
) -> tuple[Candidate | None, bool]:
    """(the best plan of this case if faster than `limit_s`, whether it may fit), over the slices of its loss.

    More slices cost time and free memory: once nothing is recomputed, no more are worth it.
    """
    best, may_fit = None, False
    known: Known = {}
    if prices.relaxed is not None:
        *_, ranges, fits = _spread(replace(case, price=prices.relaxed), request, hardware, limit_s, known)
        if ranges is None:
            return None, fits
    for price in prices.each:
        found, fits = _solve_one(replace(case, price=price), request, hardware, limit_s, known)
        may_fit |= fits
        if found is not None:
            best, limit_s = found, found.estimate.step_time_s
            if not found.plan.activations.recompute:
                break
    return best, may_fit


def _solve_one(
    case: Case, request: Request, hardware: Hardware, limit_s: float, known: Known
) -> tuple[Candidate | None, bool]:
    costs, ranges, fits = _spread(case, request, hardware, limit_s, known)
    if ranges is None:
        return None, fits
    plan = _plan(case, request, ranges, costs.recompute(ranges))
    estimate = estimate_price(case.price, plan, hardware)
    return Candidate(plan, case.price.model, estimate) if estimate.step_time_s < limit_s else None, True


def _spread(
    case: Case, request: Request, hardware: Hardware, limit_s: float, known: Known
) -> tuple[StageCosts, Ranges | None, bool]:
    """The layers over the stages: the best ranges, None if none fits within the limit, and whether any may fit."""
    choice, price = case.choice, case.price
    room_s = limit_s - bubble_s(choice, price)
    costs = StageCosts(choice, price, request, hardware, room_s / choice.micro_batches, known)
    if costs.average_bytes() > request.budget_bytes:
        return costs, None, False
    if choice.virtual_stages == 1:
        ranges = costs.split()
    else:

        def step_s(ranges: Ranges) -> float:
            return estimate_price(price, _plan(case, request, ranges), hardware).step_time_s

        ranges = split_virtual(costs, step_s, limit_s)
    return costs, ranges, ranges is not None or limit_s < inf  # under a limit, None may mean too slow


def _plan(case: Case, request: Request, ranges: Ranges, recompute: tuple[RecomputeChoice, ...] = ()) -> Plan:
    choice = case.choice
    return Plan(
        mesh=choice.mesh,
        batch=choice.batch,
        pipeline=request.pins.applied(Pipeline(stages=ranges, schedule=choice.schedule)),
        sharding=choice.sharding,
        activations=replace(request.activations, recompute=recompute, loss_chunks=case.price.loss_chunks),
        compute=request.compute,
        optimizer=request.optimizer,
        solution=Solution(choice.mesh.tp, {}, case.price.model.solution),
        context=Solution(choice.mesh.cp, {}, case.price.model.context),
    )


class _Ranking:
    """The best candidate of each mesh; the limit a newcomer must beat."""

    def __init__(self, keep: int, gpus: int) -> None:
        self.keep = keep
        self.gpus = gpus
        self.best: dict[Mesh, Candidate] = {}
        self._first_s = self._last_s = inf  # of those that are kept

    def limit_s(self, choice: Choice) -> float:
        own = self.best.get(choice.mesh)
        own_s = own.estimate.step_time_s if own else inf
        # Fewer GPUs are of interest only where they are faster than all that was found.
        return min(own_s, self._first_s if choice.mesh.world_size < self.gpus else self._last_s)

    def add(self, candidate: Candidate) -> None:
        self.best[candidate.plan.mesh] = candidate
        steps = sorted(c.estimate.step_time_s for c in self.best.values())
        self._first_s, self._last_s = steps[0], steps[self.keep - 1] if len(steps) >= self.keep else inf

    def ranked(self) -> tuple[Candidate, ...]:
        return tuple(sorted(self.best.values(), key=lambda c: c.estimate.step_time_s)[: self.keep])


def _notes(best: Sequence[Candidate], cluster: Cluster, coupling: Coupling | None) -> tuple[str, ...]:
    """Said aloud: samples that cannot be spread freely, a plan that leaves GPUs idle."""
    said = () if coupling is None else (str(coupling),)
    chosen = best[0]
    used = chosen.plan.mesh.world_size
    if used == cluster.gpus:
        return said
    full = next((c for c in best if c.plan.mesh.world_size == cluster.gpus), None)
    why = f"no legal plan that fits uses all {cluster.gpus}"
    if full is not None:
        loss = full.estimate.step_time_s / chosen.estimate.step_time_s - 1
        why = f"the best on all {cluster.gpus} takes {loss:.1%} longer"
    return (*said, f"uses {used} of {cluster.count}: {why}")
