"""The space of plans: legal meshes, micro-batches, schedules and ZeRO stages; reasons for the others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

from autopar.cost_models.hardware import Cluster
from autopar.errors import PlanError
from autopar.mesh import AXES, Mesh
from autopar.plan import CONTEXT_LAYOUTS, Optimizer, check_precision, sharding_text
from autopar.recompute import FORM, Again, choice, whole_layers
from autopar.rules.coupling import Coupling
from autopar.schedules import why_not_split

from .schedules import recomputes, schedule_reasons, schedules

Recompute = str | int | tuple[int, ...] | tuple[Again, ...]


@dataclass(frozen=True)
class Pins:
    """Choices fixed by the user; None leaves one free.

    attention: the layout of cp, "ring", "ulysses" or "all_gather".
    recompute: "none", "full" (each layer whole), regions ("attention core, mlp"), "groups of 2", the number of layers
    in each stage, or the layer indices. loss_chunks: slices of the vocabulary in which head and loss are computed,
    1 for whole logits. reduce_dtype is not searched: gradients are summed in the dtype of the master weights, unless
    it says otherwise.
    """

    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    tp: int | None = None
    zero: int | None = None
    hsdp: int | None = None
    offload: bool | None = None
    micro_batch: int | None = None
    schedule: str | None = None
    virtual_stages: int | None = None
    recompute: Recompute | None = None
    loss_chunks: int | None = None
    reduce_dtype: str | None = None
    attention: str | None = None
    forbid: Mapping[str, Collection[Any]] = field(default_factory=dict)  # by the names above

    def __post_init__(self) -> None:
        names = {f.name for f in fields(self)} - {"forbid", "reduce_dtype"}
        for name in self.forbid:
            if name in ("recompute", "reduce_dtype"):
                raise PlanError(f"forbid={name!r}: pin it to what you want instead")
            if name not in names:
                raise PlanError(f"forbid={name!r}: use one of {', '.join(sorted(names))}")
        if self.attention not in (None, *CONTEXT_LAYOUTS):
            raise PlanError(f"attention={self.attention!r}: use one of {', '.join(CONTEXT_LAYOUTS)}")
        for name in ("pp", "dp", "cp", "tp", "hsdp", "micro_batch", "virtual_stages", "loss_chunks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name}={value}: use 1 or more")
        if isinstance(self.recompute, int) and self.recompute < 0:
            raise PlanError(f"recompute={self.recompute}: use 0 or more layers a stage")
        if isinstance(self.recompute, str):
            object.__setattr__(self, "recompute", _recompute(self.recompute))

    def allows(self, name: str, value: Any) -> bool:
        """Neither pinned to something else nor forbidden."""
        pinned = getattr(self, name)
        return (pinned is None or pinned == value) and value not in self.forbid.get(name, ())

    @property
    def again(self) -> tuple[Again, ...] | None:
        """What is recomputed where the pin names layers; None where it does not."""
        if not isinstance(self.recompute, tuple):
            return None
        given = self.recompute
        plain = whole_layers(sorted(layer for layer in given if isinstance(layer, int)))
        return plain or tuple(again for again in given if isinstance(again, Again))

    def __str__(self) -> str:
        pinned = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name != "forbid"]
        pinned = [text for text in pinned if not text.endswith("=None")]
        forbidden = [f"no {name}={value}" for name, values in self.forbid.items() for value in values]
        return ", ".join(pinned + forbidden)


def _recompute(text: str) -> str:
    """A pin in words, as it is compared."""
    try:
        return text if text in ("none", "full") else choice(text)
    except PlanError as error:
        raise PlanError(f"recompute={text!r}: use 'none', 'full', {FORM}, a number or layer indices") from error


@dataclass(frozen=True)
class Request:
    """What is to be trained: samples a step, tokens a sample, bytes a GPU may use; whether samples are coupled."""

    global_batch: int
    sequence: int
    budget_bytes: float
    precision: str = "bf16"
    optimizer: Optimizer = Optimizer()
    pins: Pins = Pins()
    coupling: Coupling | None = None
    compile: bool = False


@dataclass(frozen=True)
class Choice:
    """One point of the space, before layers are spread over stages."""

    mesh: Mesh
    micro_batch: int
    micro_batches: int
    schedule: str
    zero: int
    hsdp: int | None = None
    offload: bool = False
    virtual_stages: int = 1

    @property
    def sharding(self) -> str:
        return sharding_text(self.zero, self.hsdp, self.offload)


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
    check(request, cluster, context=any(cp > 1 for cp, _ in solved))
    reasons = _reasons(request, cluster, layers, solved, illegal)
    meshes = [mesh for mesh in _meshes(cluster.gpus, layers, solved) if _allowed(mesh, request)]
    per_node = cluster.hardware.gpus_per_node
    choices = tuple(choice for mesh in meshes for choice in _choices(mesh, request, layers, per_node))
    if not choices:
        pinned = f" with {request.pins}" if str(request.pins) else ""
        why = "; ".join(reasons) or "the pins contradict each other"
        raise PlanError(
            f"no legal plan for {cluster.gpus} GPUs, {layers} layers and global_batch="
            f"{request.global_batch}{pinned}: {why}. Free a pin, or change gpus or global_batch"
            f"{f'. {request.coupling.detail}' if request.coupling else ''}"
        )
    return Space(choices, tuple(reasons))


def check(request: Request, cluster: Cluster, context: bool = False) -> None:
    """PlanError, with the arithmetic, where pins and cluster or batch cannot go together. context: cp may be free."""
    pins, gpus, batch = request.pins, cluster.gpus, request.global_batch
    check_precision(request.precision, pins.reduce_dtype)
    if batch < 1 or request.sequence < 1:
        raise PlanError(f"global_batch={batch}, sequence={request.sequence}: use 1 or more of each")
    sizes = {name: getattr(pins, name) for name in ("pp", "dp", "cp", "tp") if getattr(pins, name) is not None}
    pinned = 1
    for size in sizes.values():
        pinned *= size
    text = " × ".join(f"{name}={size}" for name, size in sizes.items())
    if gpus % pinned:
        low, high = gpus // pinned * pinned, -(-gpus // pinned) * pinned
        counts = " or ".join(str(count) for count in (low, high) if count)
        way = f"use gpus={counts}"
        if len(sizes) == 1:
            way += f", or {next(iter(sizes))} one of {_listed(divisors(gpus))}"
        raise PlanError(f"gpus={gpus} is not divisible by {text}{f' = {pinned}' if len(sizes) > 1 else ''}: {way}")
    if len(sizes.keys() - {"cp"}) == 3 and pinned != gpus and not (context and pins.cp is None):
        raise PlanError(f"{text} = {pinned} leaves {gpus - pinned} of gpus={gpus} idle: use gpus={pinned}, or free one")
    samples = (pins.dp or 1) * (pins.micro_batch or 1)
    if batch % samples:
        _refuse_batch(pins, batch, samples)


def divisors(n: int) -> list[int]:
    """In ascending order."""
    return [d for d in range(1, n + 1) if n % d == 0]


def _refuse_batch(pins: Pins, batch: int, samples: int) -> None:
    names = [f"{name}={getattr(pins, name)}" for name in ("micro_batch", "dp") if getattr(pins, name)]
    low, high = batch // samples * samples, -(-batch // samples) * samples
    counts = " or ".join(str(count) for count in (low, high) if count)
    product_text = f" = {samples}" if len(names) > 1 else ""
    raise PlanError(
        f"global_batch={batch} is not divisible by {' × '.join(names)}{product_text}: "
        f"use global_batch={counts}, or values whose product divides it (one of {_listed(divisors(batch))})"
    )


def _listed(values: list[int]) -> str:
    return ", ".join(map(str, values)) if len(values) <= 12 else ", ".join(map(str, values[:11])) + ", …"


def _meshes(gpus: int, layers: int, solved: Collection[tuple[int, int]]) -> Iterator[Mesh]:
    for (cp, tp), pp in product(sorted(solved), range(1, layers + 1)):
        for dp in range(1, gpus // (cp * tp * pp) + 1):
            yield Mesh(pp=pp, dp=dp, cp=cp, tp=tp)


def _allowed(mesh: Mesh, request: Request) -> bool:
    pins = request.pins
    if request.coupling and not request.coupling.replicas and mesh.dp > 1:
        return False
    return request.global_batch % mesh.dp == 0 and all(pins.allows(axis, mesh.size(axis)) for axis in AXES)


def _choices(mesh: Mesh, request: Request, layers: int, per_node: int) -> Iterator[Choice]:
    pins = request.pins
    samples = request.global_batch // mesh.dp
    for micro_batch in divisors(samples) if request.coupling is None else [samples]:
        if not pins.allows("micro_batch", micro_batch):
            continue
        m = samples // micro_batch
        for (schedule, v), sharding in product(
            schedules(mesh.pp, m, layers, pins), _shardings(mesh, m, pins, per_node)
        ):
            if not why_not_split(schedule, sharding[0], recomputes(pins), request.compile):
                yield Choice(mesh, micro_batch, m, schedule, *sharding, v)


def _shardings(mesh: Mesh, micro_batches: int, pins: Pins, per_node: int) -> list[tuple[int, int | None, bool]]:
    """ZeRO stage, ranks of a group, offload."""
    data = mesh.dp * mesh.cp
    return [
        (zero, hsdp, offload)
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
    pins, batch = request.pins, request.global_batch
    reasons = [f"{size} ({why})" for size, why in sorted(illegal.items())]
    if request.coupling:
        more = "several micro-batches" if request.coupling.replicas else "dp > 1 and several micro-batches"
        reasons.append(f"{more} ({request.coupling.short})")
    tps = sorted({tp for _, tp in solved})
    if pins.tp is not None and pins.tp not in tps and f"tp={pins.tp}" not in illegal:
        reasons.append(f"tp={pins.tp} (no solution; there are {_listed(tps)})")
    for size in divisors(cluster.gpus):
        if size > layers and pins.allows("pp", size):
            reasons.append(f"pp={size} ({layers} layers)")
        if batch % size and pins.allows("dp", size):
            reasons.append(f"dp={size} (global batch {batch})")
    if pins.hsdp:
        reasons.append(f"hsdp={pins.hsdp} needs zero=1, 2 or 3 and data ranks that it divides")
    if pins.offload:
        reasons.append("offload needs zero=1, 2 or 3")
    return reasons + schedule_reasons(request.pins, cluster.gpus, layers)
