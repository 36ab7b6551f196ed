"""Why no plan fits: the plan that comes nearest, and what fills it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cost_models.compute import StageShape, stage_shape
from autopar.cost_models.hardware import Hardware, unit_of
from autopar.cost_models.memory import MemoryTerm, host_room_bytes, rank_host_ledger, rank_ledger, total_bytes
from autopar.plan.recompute import LAYER

from .case import Case
from .loss_chunks import smallest_logits
from .pins import Recompute, Request
from .sizes import gib
from .stages import LEANEST, StageCosts, context_of, pinned_recompute


def infeasible_text(cases: Sequence[Case], request: Request, hardware: Hardware) -> str:
    """The plan that comes nearest to the budget: by how much it misses it, and what fills it."""
    nearest: tuple[float, Case, int, tuple[MemoryTerm, ...], str] | None = None
    for least_bytes, case in _leanest(cases, request, hardware):
        if nearest is not None and least_bytes >= nearest[0]:
            break
        for recompute in LEANEST if request.pins.recompute is None else (request.pins.recompute,):
            found = _least_memory(case, recompute, request, hardware)
            if nearest is None or found[0] < nearest[0]:
                nearest = (found[0], case, *found[1:])
    assert nearest is not None, "the space has at least one choice"
    need_bytes, case, stage, terms, recompute_text = nearest
    choice = case.choice
    largest = sorted(terms, key=lambda term: -term.size_bytes)[:3]
    if need_bytes <= request.budget_bytes:
        return _host_text(case, request, hardware)
    filled = ", ".join(f"{term.name} {gib(term.size_bytes)}" for term in largest)
    pinned = f" with {request.pins}" if str(request.pins) else ""
    ways = [f"more {unit_of(hardware.name, 2)}", "a larger memory budget"]
    ways += ["a shorter sequence"] * (request.batch.sequence > 1) + ["fewer pins"] * bool(pinned)
    chunks_text = f", loss_chunks {case.price.loss_chunks}" if case.price.loss_chunks > 1 else ""
    return (
        f"no plan fits {gib(request.budget_bytes)} a {hardware.unit}{pinned}: the nearest ({choice.mesh}, "
        f"zero {choice.sharding.text()}, micro-batch {choice.batch.micro_batch}, "
        f"recompute {recompute_text}{chunks_text}) "
        f"needs {gib(need_bytes)} on stage {stage}, {gib(need_bytes - request.budget_bytes)} too much. "
        f"Most of it: {filled}. "
        f"Use {', '.join(ways[:-1])} or {ways[-1]}"
    )


def _leanest(cases: Sequence[Case], request: Request, hardware: Hardware) -> list[tuple[float, Case]]:
    """By ascending lower bound in bytes; of cases that differ in the micro-batch alone, the two extremes."""
    groups: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        choice = case.choice
        placements = case.price.model.context, case.price.model.solution
        kind = (choice.mesh, choice.schedule, choice.virtual_stages, choice.sharding, placements)
        groups.setdefault(kind, []).append(case)
    picked = [pick(g, key=lambda case: case.choice.batch.micro_batch) for g in groups.values() for pick in (min, max)]
    picked = [replace(case, price=smallest_logits(case.price, request)) for case in picked]
    bounds = [StageCosts(case.choice, case.price, request, hardware).average_bytes() for case in picked]
    return sorted(zip(bounds, picked, strict=True), key=lambda pair: pair[0])


def _least_memory(
    case: Case, recompute: Recompute, request: Request, hardware: Hardware
) -> tuple[float, int, tuple[MemoryTerm, ...], str]:
    """(peak bytes of the fullest rank, that rank, its ledger, what is recomputed), layers spread evenly over stages."""
    price, context, pp = case.price, context_of(case.choice, request, hardware), case.choice.mesh.pp
    ranges = _even(case)
    shapes = [stage_shape(price, *of, request.pins.recompute_choices or ()) for of in ranges]
    if not context.splits_backward:
        shapes = [replace(shape, recomputed=pinned_recompute(recompute, price, shape)) for shape in shapes]
    ledgers = [rank_ledger(price, shapes[rank::pp], rank, context) for rank in range(pp)]
    fullest = max(((total_bytes(terms), rank, terms) for rank, terms in enumerate(ledgers)), key=lambda peak: peak[0])
    return *fullest, _recomputed_text(shapes)


def _recomputed_text(shapes: Sequence[StageShape]) -> str:
    """What the layers that there are recompute: "none", "full", "groups of 8"."""
    names = dict.fromkeys(what for shape in shapes for chosen in shape.recomputed for what, count in chosen if count)
    return ", ".join("full" if what == LAYER else what for what in names) or "none"


def _even(case: Case) -> list[tuple[int, int]]:
    layers, stages = len(case.price.layers), case.choice.mesh.pp * case.choice.virtual_stages
    return [(layers * stage // stages, layers * (stage + 1) // stages) for stage in range(stages)]


def _host_text(case: Case, request: Request, hardware: Hardware) -> str:
    """The GPUs have room, and the host has not."""
    context, pp, ranges = context_of(case.choice, request, hardware), case.choice.mesh.pp, _even(case)
    shapes = [stage_shape(case.price, *of) for of in ranges]
    need_bytes = max(total_bytes(rank_host_ledger(case.price, shapes[rank::pp], rank, context)) for rank in range(pp))
    return (
        f"no plan fits the memory of the hosts with {request.pins}: the nearest ({case.choice.mesh}, zero "
        f"{case.choice.sharding.text()}) keeps {gib(need_bytes)} a GPU there, and a GPU's share of its node is "
        f"{gib(host_room_bytes(hardware))}. Use more GPUs, larger groups of hsdp, or offload=False"
    )
