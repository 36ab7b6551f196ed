"""The space of plans: legal meshes, micro-batches, schedules and ZeRO stages; reasons for the others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from autopar.cost_models.hardware import Cluster
from autopar.errors import PlanError
from autopar.plan.recompute import MOST_LAYERS
from autopar.plan.schedules import MULTI_STAGE, why_not, why_not_split
from autopar.runtime.choices import AXES, SCHEDULES, Batch, Mesh, Sharding

from .pins import Pins, Request, check_request
from .sizes import divisors, listed

NO_STAGES = "pp > 1"  # what is illegal where a model has nothing to spread over stages
_MESHES_TRIED = 100
_VIRTUAL = {"interleaved": (2, 4), "zero-bubble": (1,)}  # stages a rank that are searched; others can be pinned


@dataclass(frozen=True)
class Choice:
    """One point of the space, before layers are spread over stages."""

    mesh: Mesh
    batch: Batch
    schedule: str
    sharding: Sharding
    virtual_stages: int = 1

    @property
    def micro_batches(self) -> int:
        """On each data-parallel rank."""
        return self.batch.micro_batches(self.mesh.dp)


@dataclass(frozen=True)
class Space:
    """The legal choices, and the reasons why others are not, as the table's footer names them."""

    choices: tuple[Choice, ...]
    not_legal: tuple[str, ...]


def enumerate_space(
    request: Request, cluster: Cluster, layers: int, solved: Collection[tuple[int, int]], illegal: Mapping[str, str]
) -> Space:
    """Every legal choice on at most `cluster.gpus` GPUs.

    solved: (cp, tp) for which the model has a solution; illegal: why others have none ("tp=24" → "32 heads").
    PlanError if the pins contradict the cluster, the batch or each other.
    """
    check_request(request, cluster, context=any(cp > 1 for cp, _ in solved))
    reasons = _reasons(request, cluster, layers, solved, illegal)
    meshes = _meshes(request, cluster.gpus, layers, solved)
    choices = tuple(choice for mesh in meshes for choice in _choices(mesh, request, layers, cluster.per_node))
    if not choices:
        raise PlanError(_no_plan(request, f"{cluster.count}, {layers} layer{'s' * (layers > 1)}", reasons))
    return Space(choices, tuple(reasons))


def check_space(request: Request, cluster: Cluster) -> None:
    """PlanError where pins, cluster and batch leave no legal plan, whatever the model is: asked before it is traced.

    A sequence of 1 is one that is not known yet. Of huge clusters only the first meshes are looked at: what those do
    not show is left to the search.
    """
    sizes, pins = divisors(cluster.gpus), request.pins
    cps = (
        [cp for cp in sizes if request.batch.sequence == 1 or request.batch.sequence % cp == 0]
        if pins.cp is None
        else [pins.cp]
    )
    check_request(request, cluster, context=max(cps) > 1)
    tps = [tp for tp in sizes if pins.allows("tp", tp)][:1]  # a larger one only takes more of the cluster
    solved = list(product(cps, tps))
    for tried, mesh in enumerate(_meshes(request, cluster.gpus, MOST_LAYERS, solved)):
        if tried >= _MESHES_TRIED or any(True for _ in _choices(mesh, request, MOST_LAYERS, cluster.per_node)):
            return
    raise PlanError(_no_plan(request, cluster.count, _reasons(request, cluster, MOST_LAYERS, solved, {})))


def _no_plan(request: Request, machine: str, reasons: Collection[str]) -> str:
    pinned = f" with {request.pins}" if str(request.pins) else ""
    return (
        f"no legal plan for {machine} and global_batch={request.batch.global_batch}{pinned}: "
        f"{'; '.join(reasons) or 'the pins contradict each other'}. Free a pin, or change gpus or global_batch"
        f"{f'. {request.coupling.detail}' if request.coupling else ''}"
    )


def _meshes(request: Request, gpus: int, layers: int, solved: Collection[tuple[int, int]]) -> Iterator[Mesh]:
    alone = request.coupling is not None and not request.coupling.replicas
    replicas = [1] if alone else divisors(request.batch.global_batch)
    pinned = request.pins.pp
    for cp, tp in sorted(solved):
        pps = range(1, min(layers, gpus // (cp * tp)) + 1)
        for pp in pps if pinned is None else {pinned}.intersection(pps):
            for dp in replicas:
                if dp * cp * tp * pp > gpus:
                    break
                mesh = Mesh(pp=pp, dp=dp, cp=cp, tp=tp)
                if all(request.pins.allows(axis, mesh.size(axis)) for axis in AXES):
                    yield mesh


def _choices(mesh: Mesh, request: Request, layers: int, per_node: int) -> Iterator[Choice]:
    pins, recompute, compiled = request.pins, recomputes(request.pins), request.compute.compile
    samples = request.batch.global_batch // mesh.dp
    for micro_batch in divisors(samples) if request.coupling is None else [samples]:
        if not pins.allows("micro_batch", micro_batch):
            continue
        m, batch = samples // micro_batch, replace(request.batch, micro_batch=micro_batch)
        for (schedule, v), sharding in product(
            schedules(mesh.pp, m, layers, pins), _shardings(mesh, m, request, per_node)
        ):
            if not why_not_split(schedule, sharding.zero, recompute, compiled):
                yield Choice(mesh, batch, schedule, sharding, v)


def _shardings(mesh: Mesh, micro_batches: int, request: Request, per_node: int) -> list[Sharding]:
    data, pins = mesh.dp * mesh.cp, request.pins
    return [
        replace(request.sharding, zero=zero, hsdp=hsdp, offload=offload)
        for offload in (False, True)
        for zero in _zeros(data, micro_batches, pins.zero, offload)
        for hsdp in _groups(zero, data, per_node // mesh.tp, pins.hsdp)
        if pins.allows("offload", offload)
        and pins.allows("zero", zero)
        and pins.allows("hsdp", (hsdp or data) if zero else None)
    ]


def _zeros(data: int, micro_batches: int, pinned: int | None, offload: bool) -> tuple[int, ...]:
    """One data rank has nothing to share out, but states to offload; ZeRO-0 whole ones, which stay on the device.

    With one micro-batch ZeRO 1 and 2 are the same program.
    """
    if data == 1 and not offload:
        return (0,) if pinned is None else (pinned,)
    zeros = (1, 3) if micro_batches == 1 and pinned != 2 else (1, 2, 3)
    return zeros if offload else (0, *zeros)


def _groups(zero: int, data: int, per_node: int, pinned: int | None) -> Iterator[int | None]:
    """All data ranks, those of a node, for ZeRO-3, which gathers most, of several nodes; any that divides if pinned.

    Less than a node's would gather over the same links, and keep more.
    """
    yield None
    for ranks in divisors(data)[1:-1] if zero else ():
        if pinned or ranks == per_node or (zero == 3 and per_node > 1 and ranks % per_node == 0):
            yield ranks


def _reasons(
    request: Request, cluster: Cluster, layers: int, solved: Collection[tuple[int, int]], illegal: Mapping[str, str]
) -> list[str]:
    """Why sizes that divide the cluster are left out."""
    pins, batch = request.pins, request.batch.global_batch
    reasons = [f"{size} ({why})" for size, why in sorted(illegal.items())]
    if request.coupling:
        more = "several micro-batches" if request.coupling.replicas else "dp > 1 and several micro-batches"
        reasons.append(f"{more} ({request.coupling.short})")
    tps = sorted({tp for _, tp in solved})
    if pins.tp is not None and pins.tp not in tps and f"tp={pins.tp}" not in illegal:
        reasons.append(f"tp={pins.tp} (no solution; there are {listed(tps)})")
    for size in divisors(cluster.gpus):
        if size > layers and pins.allows("pp", size) and NO_STAGES not in illegal:
            reasons.append(f"pp={size} ({layers} layer{'s' * (layers > 1)})")
        if batch % size and pins.allows("dp", size):
            reasons.append(f"dp={size} (global batch {batch})")
    return reasons + _pin_reasons(request.pins, cluster.gpus, layers)


def schedules(pp: int, micro_batches: int, layers: int, pins: Pins) -> Iterator[tuple[str, int]]:
    """(schedule, virtual stages). 1f1b comes first: as fast as gpipe with fewer micro-batches in flight."""
    pinned = pins.virtual_stages
    for schedule in ("none", "1f1b", "gpipe", *MULTI_STAGE):
        for v in (pinned,) if pinned is not None else _VIRTUAL.get(schedule, (1,)):
            legal = pp * v <= layers and not why_not(schedule, pp, v, micro_batches)
            if legal and pins.allows("schedule", schedule) and v not in pins.forbid.get("virtual_stages", ()):
                yield schedule, v


def recomputes(pins: Pins) -> bool:
    """Whether layers are recomputed whatever the plan."""
    return pins.recompute not in (None, "none", 0, ())


def _pin_reasons(pins: Pins, gpus: int, layers: int) -> list[str]:
    """Why the pinned sharding and schedule are left out, and zero-bubble wherever there is a pipeline."""
    pinned, v = pins.schedule, pins.virtual_stages
    least = "virtual_stages of 2 or more, " if pinned == "interleaved" else ""
    split = min(gpus, layers) > 1 and pins.pp != 1 and pins.allows("schedule", "zero-bubble")
    reasons = {
        f"hsdp={pins.hsdp} needs zero=1, 2 or 3 and data ranks that it divides": bool(pins.hsdp),
        "offload needs zero=1, 2 or 3": bool(pins.offload),
        "1f1b needs pp > 1 and at least pp micro-batches": pinned == "1f1b",
        "schedule=none is for pp=1": pinned == "none" and pins.pp != 1,
        f"schedule={pinned} (there are {', '.join(SCHEDULES)})": pinned not in (None, *SCHEDULES),
        f"{pinned} needs pp > 1, {least}and micro-batches in m // pp equal rounds": pinned in MULTI_STAGE,
        f"virtual_stages={v} (pp · virtual_stages stages of {layers} layers)": (v or 0) * (pins.pp or 2) > layers,
        "virtual_stages > 1 are for interleaved and zero-bubble": (v or 0) > 1,
        "zero-bubble with zero=2 or 3 (its halves of a backward do not reshard)": split,
        "zero-bubble with recompute (the second half would run it again)": split,
    }
    return [reason for reason, holds in reasons.items() if holds]
